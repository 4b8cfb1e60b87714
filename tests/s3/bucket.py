"""Creates the bucket of the tests; fails until the server of `with-store.sh` answers. No library of ours can do it."""

import base64
import hmac
import os
import urllib.request
from email.utils import formatdate

bucket, when = os.environ["HOLDFAST_S3_BUCKET"], formatdate(usegmt=True)
# S3's second version of signatures: https://docs.aws.amazon.com/AmazonS3/latest/userguide/RESTAuthentication.html
signed = hmac.digest(
    os.environ["AWS_SECRET_ACCESS_KEY"].encode(), f"PUT\n\n\n{when}\n/{bucket}".encode(), "sha1"
)
key = f"AWS {os.environ['AWS_ACCESS_KEY_ID']}:{base64.b64encode(signed).decode()}"
request = urllib.request.Request(
    f"{os.environ['AWS_ENDPOINT_URL']}/{bucket}", method="PUT", headers={"Date": when, "Authorization": key}
)
with urllib.request.urlopen(request, timeout=30):
    pass
