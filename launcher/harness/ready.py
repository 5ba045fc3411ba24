"""What processes have imported before they begin: those of a benchmark, and programs of tests.

Torch takes seconds of a core to import, and half of them only at the first optimizer. A fork server
does it once for all processes of a benchmark.
"""

import torch

from p2ptrain import Peer  # noqa: F401 - and all that it imports

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports what compiles, too
