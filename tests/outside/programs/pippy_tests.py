"""torchpippy: its own tests of the pipeline, which it installs beside itself.

They compare outputs and gradients of a pipeline of four workers with those of one
process.
"""

import importlib.metadata
import os
import runpy
import sys
import tempfile

from spawning import free_port, show

RUNS = (
    ("local_test_forward.py",),
    ("local_test_forward_backward.py",),
    ("local_test_forward_backward.py", "--schedule", "1F1B"),
)


def main():
    files = importlib.metadata.files("torchpippy")
    os.chdir(tempfile.mkdtemp())  # they write profiles
    for name, *arguments in RUNS:
        (file,) = (file for file in files if file.name == name)
        port = str(free_port())
        sys.argv = [name, "--master_port", port, "--cuda", "0", *arguments]
        runpy.run_path(str(file.locate()), run_name="__main__")
        show(name, *arguments, "passes")


if __name__ == "__main__":
    main()
