"""What processes have imported before they begin: those of a benchmark, and peers of the lab.

Torch takes seconds of a core to import, and half of them only at the first optimizer. A fork server
does it once for all of them. Programs of tests begin with the same.
"""

import torch

from p2ptrain import Peer  # noqa: F401 - and all that it imports

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports what compiles, too
