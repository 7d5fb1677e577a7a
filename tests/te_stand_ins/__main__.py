"""Run one process of `launch`. The arguments are two files: CALL and RESULT."""

import pickle
import sys
from pathlib import Path

from tests.te_stand_ins import install

install()
import torch  # noqa: E402

torch.set_num_threads(1)  # the processes share this machine's cores
function, args = pickle.loads(Path(sys.argv[1]).read_bytes())  # imports megatron-core, which finds what is installed
Path(sys.argv[2]).write_bytes(pickle.dumps(function(*args)))
