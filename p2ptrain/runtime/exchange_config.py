"""Settings of how vectors travel in groups, and of what becomes of lies among them."""

import math
from dataclasses import dataclass

from p2ptrain.compute.codec import load_codec
from p2ptrain.core.links import MAX_MBIT
from p2ptrain.core.offenders import Judge
from p2ptrain.errors import ConfigError, check_above_0
from p2ptrain.ids import Seconds
from p2ptrain.net.wire import MAX_CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """How vectors travel."""

    chunk_kib: int = 1024
    """Size of one chunk as float32, at most; small shards travel in smaller ones. Too small: work
    per chunk dominates; too large: nothing overlaps, a chunk does not stay in a core's cache
    between arriving and being reduced, and gRPC holds several of them for each stream."""

    codec: str = "fp32"
    """How models travel: ``fp32`` as they are, ``bf16`` or ``fp16`` in half of the bytes, ``int8``
    in a quarter. Nothing of what training does is lost, but peers differ by a little rounding, and
    it costs computing: worth it on links below some 10 Gbit/s. ``int4``, an eighth, is
    for gradients and pseudo-gradients with error feedback: with models nothing is lost either, but
    peers differ by much, and each is worse than the mean of all: measure first. The same at all
    peers."""

    gradient_codec: str = "fp32"
    """How gradients and pseudo-gradients (`diloco`) travel, as above, ``int4`` in an eighth of the
    bytes; all members get the same bits with every codec. What rounding takes from a gradient stays
    with its peer and goes into its next one (error feedback); only where gradients are delivered
    late (`eager`) it is lost. Statistics (buffers) always travel as they are. The same at all
    peers."""

    robust_mean: str = "none"
    """Means that bear with members that send anything, for groups of four and more: ``trimmed``
    leaves extremes out (`trimmed_share`), ``clipped`` moves a median towards each member by no more
    than the median of their distances (centered clipping, Karimireddy et al., ICML 2021) and bears
    with just under half of the members. Sums of models are not conserved any more; the ``group``
    records have by how much (``trimmed_l2``, ``clipped_l2``). The same at all peers."""

    trimmed_share: float = 0.0
    """Of each number the largest and the smallest are left out, at each end this share of the
    members, at least one (Yin et al., ICML 2018). So many members may send anything. Too small:
    fewer may; too large, up to just below 0.5: the mean is of few, and noisier. Above 0 it is
    enough to have trimmed means; 0: one at each end if `robust_mean` is ``trimmed``, else none.
    The same at all peers."""

    norm_limit: float = 0.0
    """In groups of three and more the members vote on each other's contributions: one whose norm is
    more than so many times the usual one is left out, and named. Too small: members with unusual
    data are named; too large: lies count. 10 is a good one. 0: no votes. The same at all peers."""

    opposed_groups: int = 0
    """The same for a member whose gradient points against the others' in so many groups in a row
    while those agree. Too small: a member with unusual data is named; too large: a negated gradient
    counts for long. 5 is a good one. 0: no votes. The same at all peers."""

    audited_owners: float = 0.0
    """In this share of groups of three and more each member audits a chunk of another member's
    shard: is its mean that of what all contributed? A member that hands out wrong means is named,
    and then voted out. It costs memory for two more copies of what a member contributes, and a
    digest of each number. 0: no audits. The same at all peers."""

    average_timeout_s: Seconds = 60.0
    """A group in which nothing moves for so long is broken, or sooner where less was seen to be
    enough (`core/transfers.py`). A net under the other deadlines, not a tuning knob: dead members
    end a group at once, silent ones within seconds (`core/repair.py`). A member that has all of the
    result waits so long for each whole vector that one member hands out."""

    link_mbit: int = 0
    """How many Mbit/s this peer's link carries in each direction; peers with slow links reduce
    less. 0: find out from the groups we are in, which is not possible where everyone is in every
    group. Too small: others do our work; too large: they wait for our link."""

    state_share: float = 0.5
    """The share of this peer's link, above 0 and up to 1, that it gives to newcomers while it
    trains; they take its state. It applies where the speed of the link is known (`link_mbit`, or as
    measured), and not where all wait for the newcomer (at a barrier). Too small: newcomers come
    late, with an old model; too large: averages of this peer wait for its link meanwhile."""

    fresh_optimizer: bool = False
    """Where models are averaged, this peer begins with an optimizer of its own when it takes over a
    model: it loads a half or a third of the bytes, and its moments build up anew. Where gradients
    are averaged all optimizers are equal, and their state comes along whatever this says."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunk_kib <= MAX_CHUNK_BYTES // 1024:
            most = MAX_CHUNK_BYTES // 1024
            raise ConfigError(f"chunk_kib = {self.chunk_kib} must be between 1 and {most}")
        load_codec(self.codec)
        load_codec(self.gradient_codec, "gradient_codec")
        if not 0 <= self.link_mbit <= MAX_MBIT:
            raise ConfigError(
                f"link_mbit = {self.link_mbit} must be between 1 and {MAX_MBIT}, or 0 to measure it"
            )
        if not 0 < self.state_share <= 1:
            raise ConfigError(
                f"state_share = {self.state_share} must be above 0 and at most 1: the part of the "
                "link that newcomers may use"
            )
        if not 0 <= self.trimmed_share < MOST_TRIMMED:
            raise ConfigError(
                f"trimmed_share = {self.trimmed_share} must be from 0 to below {MOST_TRIMMED}, or "
                "nothing is left to average"
            )
        if self.norm_limit and not 1 < self.norm_limit < math.inf:
            raise ConfigError(
                f"norm_limit = {self.norm_limit} must be above 1: how many times the usual norm a "
                "contribution may have; or 0 for no votes"
            )
        if self.opposed_groups < 0:
            raise ConfigError(
                f"opposed_groups = {self.opposed_groups} must be a number of groups, or 0 for no "
                "votes"
            )
        if not 0 <= self.audited_owners <= 1:
            raise ConfigError(
                f"audited_owners = {self.audited_owners} must be from 0 to 1: the share of groups "
                "in which a member audits another"
            )
        if self.robust_mean not in ROBUST_MEANS:
            raise ConfigError(
                f"robust_mean = {self.robust_mean!r} must be one of: {', '.join(ROBUST_MEANS)}"
            )
        if self.robust_mean == "clipped" and self.trimmed_share:
            raise ConfigError(
                f"robust_mean = 'clipped' and trimmed_share = {self.trimmed_share} are two kinds "
                "of mean; leave one of the two out"
            )
        check_above_0("", self, "average_timeout_s")

    @property
    def is_robust(self) -> bool:
        """Whether means leave anything out."""
        return self.robust_mean != "none" or self.trimmed_share > 0

    def trimmed(self, members: int) -> int:
        """How many of a group's numbers are left out at each end."""
        trims = self.robust_mean == "trimmed" or self.trimmed_share > 0
        if not trims or members < LEAST_ROBUST:
            return 0
        return max(1, int(self.trimmed_share * members))

    @property
    def judge(self) -> Judge | None:
        """A fresh memory of contributions; None if there are no votes on them."""
        votes = self.norm_limit or self.opposed_groups or self.audited_owners
        return Judge(self.norm_limit, self.opposed_groups) if votes else None

    def clips(self, members: int) -> bool:
        """Whether a group's numbers are clipped."""
        return self.robust_mean == "clipped" and members >= LEAST_ROBUST


ROBUST_MEANS = ("none", "trimmed", "clipped")
MOST_TRIMMED = 0.5
LEAST_ROBUST = 4
"""Members of a group; of three the median is left, of two nothing."""
