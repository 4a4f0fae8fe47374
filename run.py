#!/usr/bin/env python3
"""Install the requirements and run the main job or the test suite. Needs only Python 3.11 with venv.

    python3 run.py train [CONFIG] [--a.b=value ...]   train a small model (default: the example of the main job)
    python3 run.py test                               run the full test suite
    python3 run.py list                               list all nox sessions
    python3 run.py nox ARGUMENT ...                   run nox, for example `nox -s lint types`

The first run creates a virtual environment with nox in .venv, and nox creates the others under .nox. Later runs reuse
them. Remove both folders to start over.
"""

# This file must parse on any Python 3, so that an old version reports the requirement instead of a SyntaxError.
import os
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
OLDEST_PYTHON = (3, 11)
NOX = "nox==2026.10.20"


def python_problem(version, executable):
    """Return the problem of the interpreter `executable` with the given version tuple, or None."""
    if tuple(version[:2]) >= OLDEST_PYTHON:
        return None
    return (
        "Python %d.%d or newer is needed, this is Python %s (%s).\n"
        "  What to do: start this script with a newer one, e.g. `python3.11 run.py ...`;\n"
        "  on Debian 12 and Ubuntu 24.04: apt install python3 python3-venv."
    ) % (OLDEST_PYTHON + (".".join(str(part) for part in version[:3]), executable))


def nox_arguments(command, rest):
    """Return nox's arguments for a command of this script, or None for unknown commands."""
    if command == "train":
        return ["--session", "main"] + (["--"] + rest if rest else [])
    if command == "test":
        return rest
    if command == "list":
        return ["--list"] + rest
    if command == "nox":
        return rest
    return None


def main(arguments):
    problem = python_problem(sys.version_info, sys.executable)
    if problem:
        print("run.py: " + problem, file=sys.stderr)
        return 2
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    nox = nox_arguments(arguments[0], arguments[1:])
    if nox is None:
        print(
            "run.py: expected train, test, list or nox, got %r\n\n%s" % (arguments[0], __doc__),
            file=sys.stderr,
        )
        return 2

    sys.path.insert(0, os.path.join(ROOT, "tools"))
    import environments

    try:
        python = environments.Environment("nox", requirements=(NOX,), locked_as="nox").prepare(
            os.path.join(ROOT, ".venv")
        )
    except environments.SetupError as error:
        print("run.py: %s" % error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("run.py: stopped; the next run repeats this step", file=sys.stderr)
        return 130
    os.chdir(ROOT)
    os.execv(str(python), [str(python), "-m", "nox"] + nox)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
