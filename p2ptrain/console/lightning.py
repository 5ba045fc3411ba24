"""Lightning's entry point: a program of Lightning's becomes a peer without a change.

``P2PTRAIN_LIGHTNING=peer.toml python train.py`` gives each `Trainer` of the program the callback of
`integrations/lightning.py`, configured by the file (a `PeerConfig`). Without the variable Lightning
gets no callback, and nothing is imported.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2ptrain.integrations.lightning import P2PTrainCallback

VARIABLE = "P2PTRAIN_LIGHTNING"


def callbacks() -> "list[P2PTrainCallback]":
    """What Lightning adds to a `Trainer`. Raises ConfigError for a file that cannot work."""
    path = os.environ.get(VARIABLE, "")
    if not path:
        return []
    from p2ptrain.config import load_toml
    from p2ptrain.integrations.lightning import P2PTrainCallback
    from p2ptrain.runtime.settings import PeerConfig

    return [P2PTrainCallback(config=load_toml(PeerConfig, Path(path)))]
