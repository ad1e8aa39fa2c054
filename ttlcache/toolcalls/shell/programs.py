"""What is known about programs that agents run in a shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ttlcache.toolcalls.base import words

#: These prepare a command or report on it; any other command outranks them.
PREFIXES = words(
    """cd pushd popd export set unset source . alias unalias shopt ulimit umask eval
    trap true false : declare typeset local readonly deactivate echo printf
    return exit break continue shift module"""
)
#: Prefixes of two words.
PREFIX_PAIRS = frozenset(
    {
        ("conda", "activate"),
        ("conda", "deactivate"),
        ("mamba", "activate"),
        ("nvm", "use"),
        ("pyenv", "shell"),
        ("pyenv", "local"),
    }
)
#: These end within a fraction of a second as a rule: only alone do they count.
INSTANT = words(
    """ls ll cat head tail grep egrep fgrep rg ag find fd sed awk gawk wc pwd which
    whereis whoami id type command mkdir rmdir rm cp mv touch chmod chown ln nl od
    file stat date env printenv uname hostname sort uniq cut tr tee diff cmp comm
    xxd hexdump strings basename dirname realpath readlink test [ [[ tree du df ps
    kill pkill jobs history clear less more md5sum sha256sum seq column jq paste fold
    read let nproc free yes rev tac dos2unix"""
)
#: `git` is instant but for these.
SLOW_GIT = words("clone fetch pull push submodule bisect lfs gc fsck filter-branch")
#: Programs whose plain second word is data, not a subcommand.
NO_SUBCOMMAND = (PREFIXES | INSTANT) | words(
    """python pytest py.test node deno ruby perl php java bash sh zsh dash Rscript
    julia lua tsx ts-node curl wget ssh scp rsync sleep sqlite3 psql mysql javac gcc
    g++ cc c++ clang clang++ rustc ruff mypy pylint flake8 black tsc eslint jest
    mocha vitest vim vi nano man dpkg tar zip unzip gzip patch dd cmake gdb valgrind"""
)
#: Flags that take the next word, where the second word of the key is sought.
VALUE_FLAGS: Mapping[str, frozenset[str]] = {
    "git": words("-C -c --git-dir --work-tree"),
    "make": words("-C -f -j -o -W -I"),
    "npm": words("--prefix -w --workspace -C"),
    "pnpm": words("-C --dir -F --filter"),
    "yarn": words("--cwd"),
    "docker": words("-H --context -c --config -l --log-level"),
    "kubectl": words("-n --namespace --context --kubeconfig"),
    "cargo": words("--manifest-path --config -Z"),
    "mvn": words("-f -pl -P --file"),
    "gradle": words("-p -b"),
    "gradlew": words("-p -b"),
    "go": words("-C"),
    "pytest": words("-k -m -n -p -c -o -W --maxfail --timeout --rootdir --tb"),
    "gcc": words("-o -I -L"),
    "g++": words("-o -I -L"),
    "clang": words("-o -I -L"),
    "python": words("-W -X"),
    "tmux": words("-L -S -f"),
    "ninja": words("-C -j -f"),
}
#: Flags that change what the program does, so that they are its second word.
MODE_FLAGS: Mapping[str, frozenset[str]] = {
    "python": words("-c -"),
    "node": words("-e"),
    "cmake": words("--build --install"),
}
#: Package runners: `npm run x` and `npm x` have one key.
SCRIPT_RUNNERS = words("npm pnpm yarn bun")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A program that runs the command in its arguments.

    value_flags: its flags that take the next word. positionals: its own words
    before the command.
    """

    value_flags: frozenset[str] = frozenset()
    positionals: int = 0


_UV = Wrapper(
    words(
        """--with -w --python -p --extra --group --project --directory --env-file
        --package --from --index-url --index --with-editable --with-requirements"""
    )
)
_EXEC = Wrapper(
    words("-u --user -e --env -w --workdir --env-file --index --detach-keys"), 1
)

_PLAIN = """nohup, exec, builtin, setsid, unbuffer, poetry run, pipenv run, pdm run,
rye run, hatch run, bunx, pnpm exec, pnpm dlx, bundle exec"""

#: By leading words; the longest match counts.
WRAPPERS: Mapping[tuple[str, ...], Wrapper] = {
    **{tuple(name.split()): Wrapper() for name in _PLAIN.split(",")},
    ("sudo",): Wrapper(words("-u -g -h -p -C -r -t -T -U -D -R --user --group")),
    ("doas",): Wrapper(words("-u -C")),
    ("sshpass",): Wrapper(words("-p -f -d -P")),
    ("timeout",): Wrapper(words("-s -k --signal --kill-after"), 1),
    ("gtimeout",): Wrapper(words("-s -k --signal --kill-after"), 1),
    ("time",): Wrapper(words("-f -o --format --output")),
    ("xvfb-run",): Wrapper(words("-s -n -e -f -l --server-args")),
    ("env",): Wrapper(words("-u -C --unset --chdir")),
    ("nice",): Wrapper(words("-n --adjustment")),
    ("ionice",): Wrapper(words("-c -n -p")),
    ("stdbuf",): Wrapper(words("-i -o -e")),
    ("taskset",): Wrapper(positionals=1),
    ("xargs",): Wrapper(words("-n -I -P -L -d -s -a -E --max-args --max-procs")),
    ("uv", "run"): _UV,
    ("uvx",): _UV,
    ("pipx", "run"): Wrapper(words("--spec --python --pip-args")),
    ("coverage", "run"): Wrapper(words("--source --rcfile --omit --include")),
    ("conda", "run"): Wrapper(words("-n -p --name --prefix --cwd")),
    ("mamba", "run"): Wrapper(words("-n -p --name --prefix --cwd")),
    ("micromamba", "run"): Wrapper(words("-n -p --name --prefix --cwd")),
    ("npx",): Wrapper(words("-p --package")),
    ("docker", "exec"): _EXEC,
    ("podman", "exec"): _EXEC,
    ("docker", "compose", "exec"): _EXEC,
    ("docker-compose", "exec"): _EXEC,
}
#: Words of the shell's own grammar before a command.
KEYWORDS = words("do then else if elif while until ! { }")
#: Words that start no command: loop headers and closing words.
HEADERS = words("for select case done fi esac function in")
SHELLS = words("bash sh zsh dash ksh")
