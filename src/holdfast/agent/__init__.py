"""One per node: spawns and watches workers, passes their messages on."""
