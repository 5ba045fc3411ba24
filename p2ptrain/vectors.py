"""The one kind of array that peers exchange."""

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
"""float32, one-dimensional, on the host."""
