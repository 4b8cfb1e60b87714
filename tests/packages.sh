#!/usr/bin/env bash
# Debian's packages that a test server needs.
#
#   packages.sh missing PACKAGE...          prints those that are not installed, on one line; nothing when all are
#   packages.sh install WHAT PACKAGE...     installs those, saying so; WHAT needs them, in an error's words
set -euo pipefail

# dpkg-query ends with 1 and without a line for a package that it has never heard of, and prints "not-installed" for one
# that was purged: both are missing, and neither may end this script.
missing() {
  local installed
  installed=$({ dpkg-query -W -f '${Package} ${db:Status-Status}\n' "$@" 2>/dev/null || true; } |
    awk '$2 == "installed" {print $1}' | sort)
  comm -23 <(printf '%s\n' "$@" | sort) <(printf '%s\n' "$installed") | xargs
}

install() {
  local what=$1 wanted
  shift
  wanted=$(missing "$@")
  [ -n "$wanted" ] || return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "$what needs, as root: apt-get install --no-install-recommends $wanted (Debian 12 or newer)" >&2
    return 1
  fi
  # One after the other: apt-get refuses to run beside itself.
  exec 9>"${TMPDIR:-/tmp}/holdfast-packages.lock"
  flock 9
  wanted=$(missing "$@")
  [ -n "$wanted" ] || return 0
  echo "installing $wanted" >&2
  # A daemon that its package would start is none of ours: RUNLEVEL=1 keeps it from starting.
  # shellcheck disable=SC2086 - a list
  apt-get update -q >/dev/null &&
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -q -y --no-install-recommends $wanted >/dev/null || {
    echo "$what: apt-get could not install $wanted" >&2
    return 1
  }
}

"$@"
