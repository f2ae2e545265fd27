#!/bin/sh
# Install the Debian packages that the tests of clusters need and that are missing.  Only
# root can; anybody else is told what to install.
set -eu

packages="openmpi-bin mpich slurm-wlm munge openssh-server openssh-client iproute2 util-linux nftables nginx haproxy prometheus"

missing=""
for package in $packages; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null |
        grep --quiet --line-regexp installed || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "the tests of clusters need these Debian packages:$missing" >&2
    echo "install them: sudo apt-get install --no-install-recommends$missing" >&2
    exit 1
fi
apt-get update --quiet --quiet
# shellcheck disable=SC2086  # a list
DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends $missing
