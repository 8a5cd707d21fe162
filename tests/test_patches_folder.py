"""patches/: the diff for forks that want no launcher, check.sh, and pretrain_gpt.py of a patched checkout.

The runs need a checkout of Megatron-LM (about two minutes); test_plugin_megatron_lm.py says what it must have:

    pytest tests/test_patches_folder.py --megatron-lm=/path/to/Megatron-LM
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lossy.hooks.versions import SUPPORTED
from scripts.compat import WHEELS
from tests.test_plugin_megatron_lm import ENVIRONMENT, LOSS, MODEL, TORCHRUN, pretrain

pytestmark = pytest.mark.shows("`patches/`: applies or says why not; `check.sh`", device=False)
patched_script = pytest.mark.shows("a patched `pretrain_gpt.py` without launcher: the launcher's losses, or none")

ROOT = Path(__file__).parent.parent
PATCH = ROOT / "patches" / "megatron_lm.patch"
TARGET = "megatron/training/__init__.py"
ADDED = [line[1:] for line in PATCH.read_text().splitlines() if re.match(r"\+(?!\+\+)", line)]
NAMED = re.findall(r"^  \S+/Megatron-LM +(\S+)$", PATCH.read_text(), re.MULTILINE)
# How the file must end for the patch to apply.
END = [line[1:] for line in PATCH.read_text().splitlines() if line.startswith(" ") and "/" not in line]


def check(*arguments, folder=ROOT / "patches", **environment):
    """Exit status, lines of stdout, stderr of check.sh."""
    script = [folder / "check.sh", *map(str, arguments)]
    done = subprocess.run(script, capture_output=True, text=True, cwd="/", env=os.environ | environment)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture
def tree(tmp_path):
    """A folder with all that check.sh looks at; a name with a blank must not matter."""
    folder = tmp_path / "my fork"
    write(folder / TARGET, "import os", *END)
    write(folder / "megatron/core/package_info.py", "MAJOR = 0", "MINOR = 16", "PATCH = 1")
    return folder


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def git(folder, *arguments):
    options = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", "-C", folder, *options, *arguments], check=True, capture_output=True)


def commit(folder):
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "test")


def put_in(folder):
    """Run the command that check.sh prints."""
    status, lines, _ = check(folder)
    assert status == 1 and lines[1] == "megatron_lm.patch is not in, and applies:" and len(lines) == 3
    subprocess.run(shlex.split(lines[2]), check=True, cwd="/")
    assert (folder / TARGET).read_text().splitlines()[-len(ADDED) :] == ADDED


@pytest.mark.parametrize("where", ["no repository", "repository", "part of one"])
def test_check_finds_out_and_its_command_puts_the_patch_in(tree, where):
    if where == "repository":
        commit(tree)
        git(tree, "tag", "mine_v1")
    elif where == "part of one":
        commit(tree.parent)
        git(tree.parent, "tag", "theirs")
    put_in(tree)
    status, lines, _ = check(tree)
    tag = ", at the tag mine_v1" if where == "repository" else ""
    assert status == 0
    assert lines == [f"{tree}: Megatron-LM, megatron-core 0.16.1{tag}", "megatron_lm.patch is in"]


def test_check_asks_the_installed_package_where_there_is_no_checkout(tree, tmp_path):
    shutil.copytree(ROOT / "patches", tmp_path / "copy/patches")
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.symlink_to(shutil.which("false"))
    path = f"{python.parent}:{os.environ['PATH']}"
    folder = tmp_path / "copy/patches"
    assert check(tree, folder=folder, PATH=path)[::2] == (2, "check.sh: error: megatron_lossy: is not installed\n")
    python.unlink()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    status, lines, _ = check(tree, folder=folder, PATH=path, PYTHONPATH=str(ROOT))
    assert status == 1 and lines[1] == "megatron_lm.patch is not in, and applies:"
    write(tree / "megatron/core/package_info.py", "MAJOR = 0", "MINOR = 5", "PATCH = 0")
    assert "megatron-core 0.5: is not supported" in check(tree, folder=folder, PATH=path, PYTHONPATH=str(ROOT))[2]


def test_the_patch_names_all_that_it_is_for():
    releases = {wheel.rpartition(".")[0] for wheel in WHEELS}
    assert {tag[len("core_v") :].rpartition(".")[0] for tag in NAMED if tag.startswith("core_v")} == releases
    assert [tag for tag in NAMED if not tag.startswith("core_v")] == ["1.22.0", "1.23.0", "1.24.0"]


@pytest.mark.shows("the patch applies to `core_v0.12.3` to `core_v0.19.0`", device=False)
@pytest.mark.megatron_lm
def test_the_patch_applies_to_every_tag_of_a_clone(megatron_lm, tmp_path):
    """A clone, bare or not, of NVIDIA's or HabanaAI's repository, with tags."""
    here = subprocess.run(["git", "-C", megatron_lm, "tag"], capture_output=True, text=True).stdout.split()
    tags = [tag for tag in NAMED if tag in here]
    if not tags:
        pytest.skip("no clone with tags")
    for tag in tags:
        files = [TARGET, "megatron/core/package_info.py"]
        archive = ["git", "-C", megatron_lm, "archive", f"--output={tmp_path}/tag.tar", f"refs/tags/{tag}", *files]
        subprocess.run(archive, check=True)
        shutil.unpack_archive(tmp_path / "tag.tar", tmp_path / tag)
        put_in(tmp_path / tag)
        assert check(tmp_path / tag)[0] == 0


def test_check_knows_habanas(tree):
    write(tree / "megatron/core/extensions/intel_transformer_engine.py")
    assert check(tree)[1][0] == f"{tree}: HabanaAI's Megatron-LM, megatron-core 0.16.1"


def test_lines_of_the_forks_own_after_ours_are_no_obstacle(tree):
    put_in(tree)
    with open(tree / TARGET, "a") as file:
        file.write("from .ours import more\n")
    status, lines, _ = check(tree)
    assert status == 0 and lines[1].startswith("megatron_lm.patch is in, but not at the end")


def test_a_file_that_ends_otherwise_is_left_to_the_user(tree):
    write(tree / TARGET, *END, "# megatron_lossy.plugin.enable() comes later")
    status, _, error = check(tree)
    assert status == 2 and error.count("\n") == 1
    assert "megatron_lm.patch does not apply (error: patch failed" in error and "by hand" in error


@pytest.mark.parametrize("beyond", [(0, SUPPORTED[0][1] - 1), SUPPORTED[1], (1, 0)])
def test_check_refuses_the_versions_that_the_hooks_refuse(tree, beyond):
    write(tree / "megatron/core/package_info.py", f"MAJOR = {beyond[0]}", f"MINOR = {beyond[1]}", "PATCH = 0")
    status, _, error = check(tree)
    assert status == 2 and error.count("\n") == 1
    assert f"megatron-core {beyond[0]}.{beyond[1]}: is not supported; it must be at least 0.11 and below 0.21" in error


def test_check_names_what_is_wrong(tree, tmp_path):
    for arguments, named in (
        ([], "usage: "),
        ([tree, tree], "usage: "),
        (["--help"], "usage: "),
        ([tmp_path / "absent"], f"CHECKOUT {tmp_path}/absent: is not a folder"),
        ([tmp_path], f"must be the folder of Megatron-LM that has {TARGET}"),
    ):
        status, lines, error = check(*arguments)
        assert status == 2 and not lines and error.count("\n") == 1 and named in error


def test_a_patched_fork_does_without_the_package(tree):
    write(tree / TARGET, "ran = True", *ADDED)
    code = "import sys; sys.path[0] = sys.argv[1]; import megatron.training; print(megatron.training.ran)"
    # -S: no site-packages, so that this package is not there either.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(tree)], capture_output=True, text=True, cwd="/", env={"PATH": ""}
    )
    assert done.stdout == "True\n", done.stderr


@pytest.fixture(scope="module")
def fork(megatron_lm, tmp_path_factory):
    """The checkout with the patch in; what the patch does not touch is linked."""
    source, folder = Path(megatron_lm).resolve(), tmp_path_factory.mktemp("fork")
    for path in source.iterdir():
        if path.is_file():
            shutil.copy(path, folder)  # Python would follow a link to the script and find the other megatron
        elif path.name not in ("megatron", ".git"):
            (folder / path.name).symlink_to(path)
    (folder / "megatron").mkdir()
    for path in (source / "megatron").iterdir():
        if path.name == "training":
            shutil.copytree(path, folder / "megatron" / "training")
        else:
            (folder / "megatron" / path.name).symlink_to(path)
    put_in(folder)
    return folder


def run(fork, *arguments, ranks=2, script="pretrain_gpt.py", prepared=False):
    """Plain torchrun; ``prepared``: with Megatron made usable on CPU and nothing else of ours."""
    program = [str(fork / script)]
    # Without Intel's software HabanaAI's Megatron cannot even be imported.
    if prepared or (fork / "megatron/core/extensions/intel_transformer_engine.py").exists():
        program.insert(0, str(ROOT / "tests" / "bare.py"))
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", ranks, *program, *MODEL, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=ENVIRONMENT)


def numbers(done, expected=20):
    """Losses and gradient norms, every digit."""
    found = re.findall(r"(lm loss|grad norm|lm loss value): ([\d.E+-]+)", done.stdout)
    assert len(found) > 2 * expected, done.stderr[-3000:]
    return found


@patched_script
@pytest.mark.megatron_lm
@pytest.mark.timeout(600)
def test_a_patched_checkout_loses_what_the_launcher_loses(megatron_lm, fork, tmp_path):
    expected = numbers(pretrain(megatron_lm, *LOSS, "--delivery-log", tmp_path / "launcher")[1])
    assert numbers(run(fork, *LOSS, "--delivery-log", tmp_path / "fork")) == expected
    # Its last chunk is written when the run is over.
    names = sorted(path.name for path in (tmp_path / "launcher").iterdir())
    assert sorted(path.name for path in (tmp_path / "fork").iterdir()) == names and len(names) == 3
    # Under the launcher the patch does nothing.
    assert numbers(pretrain(fork, *LOSS)[1]) == expected


@patched_script
@pytest.mark.megatron_lm
@pytest.mark.timeout(600)
def test_without_loss_a_patched_checkout_is_megatrons(megatron_lm, fork):
    expected = numbers(pretrain(megatron_lm, plugin=False)[1])
    assert numbers(run(fork, prepared=True)) == expected
    assert numbers(run(fork, "--p-grad", 0)) == expected


@patched_script
@pytest.mark.megatron_lm
def test_without_our_flags_a_patched_checkout_is_not_made_to_train_on_cpu(fork):
    done = run(fork, ranks=1)
    if "bare.py" in str(done.args):
        pytest.skip("cannot be imported as it is")
    assert done.returncode and "Megatron requires CUDA" in done.stderr


@patched_script
@pytest.mark.megatron_lm
@pytest.mark.timeout(600)
def test_a_script_that_makes_up_its_command_line_loses_as_well(fork):
    script = fork / "wrapper.py"
    main = 'if __name__ == "__main__":\n'
    text = (fork / "pretrain_gpt.py").read_text()
    script.write_text(text.replace(main, f"{main}    import sys\n    sys.argv += {LOSS!r}\n"))
    # Prepared, because 0.12 asks for CUDA before it looks at the command line.
    assert numbers(run(fork, script="wrapper.py", prepared=True)) == numbers(run(fork, *LOSS))


@patched_script
@pytest.mark.megatron_lm
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--p-grad", "2"], "--p-grad 2.0: must be in [0, 1)"),
        ([*LOSS, "--check-weight-hash-across-dp-replicas-interval", 5], "--check-weight-hash-across-dp-replicas"),
        ([*LOSS, "--lossy-self", "--packet-bytes", 1], "--packet-bytes 1: must hold at least one element"),
    ],
    ids=["when imported", "when validated", "in pretrain"],
)
def test_a_patched_checkout_refuses_in_one_line(fork, flags, named):
    done = run(fork, *flags, ranks=1)
    assert f"megatron-lossy: error: {named}" in done.stderr
    assert re.search(r"exitcode *: 2 ", done.stderr)
    assert done.stderr.count("Traceback") == 1  # torchrun's own


@patched_script
@pytest.mark.megatron_lm
def test_help_of_a_patched_checkout_shows_our_flags_once(fork):
    done = run(fork, "--help", ranks=1, prepared=True)
    if done.returncode and "ValueError" in done.stderr:
        pytest.skip("the --help of this Megatron fails by itself")  # a per cent sign in a help text of 0.18
    assert done.stdout.count("loss (megatron-lossy): what is lost:") == 1
