#!/usr/bin/env bash
# Installs the programs of Debian that tests start. Where that cannot be done, the tests that need them are skipped
# and name them; so this never fails.
set -u
wanted=$(grep -v '^#' "$(dirname "$0")/packages.txt")
missing=$(for one in $wanted; do dpkg -s "$one" >/dev/null 2>&1 || echo "$one"; done)
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "not installed, and cannot be by this user:" $missing
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# Nothing is started: tests start what they need, where they need it. One that cannot be had takes no other with it.
apt-get update -qq || true
apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || for one in $missing; do
  apt-get install -y -qq --no-install-recommends "$one" >/dev/null 2>&1 || echo "could not be installed: $one"
done
exit 0
