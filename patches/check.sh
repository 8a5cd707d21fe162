#!/usr/bin/env bash
# patches/check.sh CHECKOUT: which Megatron-LM it is, and whether megatron_lm.patch applies to it or is in.
# Exit status: 0 it is in; 1 it is not, and applies; 2 neither, or CHECKOUT is not a Megatron-LM that we support.
set -euo pipefail
unset CDPATH

fail() {
    echo "check.sh: error: $*" >&2
    exit 2
}

[[ $# == 1 && $1 != -* ]] || fail "usage: patches/check.sh CHECKOUT, a folder of Megatron-LM"
command -v git > /dev/null || fail "git: is not installed"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ -d $1 ]] || fail "CHECKOUT $1: is not a folder"
checkout=$(cd "$1" && pwd)
patch=$here/megatron_lm.patch
target=$(sed -n 's|^+++ b/||p' "$patch")
info=megatron/core/package_info.py
for file in "$target" "$info"; do
    [[ -f $checkout/$file ]] || fail "CHECKOUT $1: must be the folder of Megatron-LM that has $file"
done

# Names in a diff without "diff --git" are relative to the folder, wherever in a repository, or in none, it is.
apply=(git -C "$checkout" apply)

part() { sed -n "s/^$1 *= *\([0-9]*\).*/\1/p" "$checkout/$info"; }
major=$(part MAJOR) minor=$(part MINOR)
origin="Megatron-LM"
[[ ! -f $checkout/megatron/core/extensions/intel_transformer_engine.py ]] || origin="HabanaAI's Megatron-LM"
tag=
if [[ -e $checkout/.git ]]; then # else a tag would be that of the repository around it
    tag=$(git -C "$checkout" describe --tags --exact-match 2> /dev/null) || true
fi
echo "$checkout: $origin, megatron-core $major.$minor.$(part PATCH)${tag:+, at the tag $tag}"

# The one place that says which versions are supported: of the checkout around this folder, or of the installed package.
package=$here/../megatron_lossy
[[ -d $package ]] || package=$(python -c 'import megatron_lossy; print(megatron_lossy.__path__[0])') ||
    fail "megatron_lossy: is not installed"
range=$(sed -n 's/^SUPPORTED = ((\(.*\)), (\(.*\)))$/\1 \2/p' "$package/hooks/versions.py")
read -r low_major low_minor high_major high_minor <<< "${range//,/}"
((low_major * 1000 + low_minor <= major * 1000 + minor && major * 1000 + minor < high_major * 1000 + high_minor)) ||
    fail "megatron-core $major.$minor: is not supported; it must be at least $low_major.$low_minor and below $high_major.$high_minor"

name=${patch##*/}
if "${apply[@]}" --reverse --check "$patch" 2> /dev/null; then
    echo "$name is in"
elif grep -q '^[^#]*megatron_lossy\.plugin\.enable()' "$checkout/$target"; then
    echo "$name is in, but not at the end of $target as the patch has it"
elif why=$("${apply[@]}" --check "$patch" 2>&1); then
    echo "$name is not in, and applies:"
    printf '   '
    printf ' %q' "${apply[@]}" "$patch"
    echo
    exit 1
else
    fail "$name does not apply (${why%%$'\n'*}); put its lines at the end of $target by hand"
fi
