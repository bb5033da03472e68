#!/bin/sh
# `make fresh`: run `make demo` and `make test` as a new user would, on a Debian that has nothing but `make`, `git`,
# certificates and Python. A program that only the developer's machine has makes the run fail here.
#
# The root is made by debootstrap and entered through mount and pid namespaces with pivot_root: in a plain chroot
# container engines fail, because runc and bubblewrap need a root that is a mount point. The host's settings for package
# registries (apt mirror, pip, npm, proxies, certificates) are copied into the root; none is written to the repository.
#
#   FRESH_SUITE      Debian release, default bookworm (Python 3.11)
#   FRESH_DIRECTORY  where the root is made, default a new directory under /var/tmp; removed at the end
#   FRESH_COMMAND    what is run in the clone, default "make demo && make test"
set -eu

repository=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
suite=${FRESH_SUITE:-bookworm}
command=${FRESH_COMMAND:-make demo && make test}
packages=make,git,ca-certificates,python3,python3-venv

fail() { echo "make fresh: $*" >&2; exit 2; }
[ "$(id -u)" = 0 ] || fail "debootstrap and mounts need root"
command -v apt-get >/dev/null || fail "this machine has no apt-get; debootstrap needs Debian's packages"
command -v debootstrap >/dev/null || {
	apt-get update -q >/dev/null
	DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends debootstrap >/dev/null
}
[ -z "$(git -C "$repository" status --porcelain)" ] || echo "make fresh: uncommitted changes are not in the clone" >&2

top=${FRESH_DIRECTORY:-$(mktemp -d /var/tmp/holdfast-fresh.XXXXXX)}
root=$top/root
trap 'rm -rf --one-file-system "$top"' EXIT
trap 'exit 130' INT TERM
mkdir -p "$root"

# Lines "deb MIRROR RELEASE main" for the host's Debian mirrors of this suite; other vendors' archives are left out.
sources=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 2>/dev/null |
	awk -v suite="$suite" '$2 ~ "^" suite "(-updates|-security)?$" && $3 == "main" {print "deb", $1, $2, $3}' | sort -u)
mirror=$(echo "$sources" | awk -v suite="$suite" '$3 == suite {print $2; exit}')
echo "make fresh: a minimal $suite in $root"
debootstrap --variant=minbase --include="$packages" "$suite" "$root" ${mirror:+"$mirror"} >"$top/debootstrap.log" 2>&1 ||
	{ tail -20 "$top/debootstrap.log" >&2; fail "debootstrap failed"; }
[ -z "$sources" ] || echo "$sources" >"$root/etc/apt/sources.list"

for path in /etc/resolv.conf /etc/hosts /etc/apt/auth.conf.d /etc/pip.conf "$HOME/.config/pip" "$HOME/.pip" "$HOME/.npmrc" \
	/usr/local/share/ca-certificates; do
	[ -e "$path" ] || continue
	case $path in "$HOME"/*) to=$root/root/${path#"$HOME"/} ;; *) to=$root$path ;; esac
	mkdir -p "$(dirname "$to")" && rm -rf "$to" && cp -rL "$path" "$to"
done
for path in /etc/apt/apt.conf.d/*proxy*; do [ ! -e "$path" ] || cp "$path" "$root/etc/apt/apt.conf.d/"; done
chroot "$root" update-ca-certificates >/dev/null 2>&1

# Registry settings in the environment, without those that name a file which the root lacks.
env | grep -iE '^(pip_|npm_config_|(https?|no|all)_proxy=|ssl_cert_file=|requests_ca_bundle=|node_extra_ca_certs=)' |
	while IFS='=' read -r name value; do
		case $value in /*) [ -e "$root$value" ] || continue ;; esac
		printf "export %s='%s'\n" "$name" "$value"
	done >"$root/root/registries"

git clone -q --no-local "$repository" "$root/root/holdfast"
cat >"$root/root/run" <<END
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM=${TERM:-dumb}
. /root/registries
cd /root/holdfast
$command
END

# Everything below ends with this shell: the pid namespace takes its processes, the mount namespace its mounts.
enter='set -e
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t proc proc proc
mount --rbind /sys sys
mount -t tmpfs tmpfs run
mkdir -p .old
pivot_root . .old
exec chroot . sh -c "umount -l /.old; rmdir /.old; exec env -i sh /root/run"'
started=$(date +%s)
code=0
unshare --mount --pid --uts --ipc --fork --kill-child sh -c "$enter" enter "$root" </dev/null || code=$?
echo "make fresh: '$command' ended with $code after $(($(date +%s) - started)) s (without the time for debootstrap)"
exit $code
