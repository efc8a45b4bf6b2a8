"""Value functions f: phi -> metric (paper, section 3.1): differentiable, with their domain and held-out quality."""

import math
from abc import abstractmethod
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from metricopt_ext.adapters.signature import Signature
from metricopt_ext.errors import ValueFunctionError
from metricopt_ext.tasks.combine import Combination
from metricopt_ext.utils.files import write_tensors
from metricopt_ext.utils.words import brief

FILE_FORMAT = "metricopt_ext/value_function/5"


@dataclass(frozen=True)
class Quality:
    """How well f predicts the metric at points that it was not fitted to.

    Attributes:
        spearman: Rank correlation of predicted and true cost, in [-1, 1].
        mae: Mean absolute error, in units of the cost.
        constant_mae: The same for the best constant, the median of these points.
        points: Number of these points: held-out ones or, in a search, those that were predicted before their query.
        trajectories: Number of independent trajectories that they lie on; the points themselves in a search.
        near_mae: Mean absolute error where it matters: at the quarter of the points that f predicts to be best.
        headroom: How much lower the cost is there than where f would be followed from, which the error must not exceed.
        incumbent_mae: Mean absolute error of predicting the best cost so far; None where there is no order.
    """

    spearman: float
    mae: float
    constant_mae: float
    points: int
    trajectories: int
    near_mae: float
    headroom: float
    incumbent_mae: float | None = None

    @property
    def spearman_lower(self) -> float:
        """One-sided 95% lower confidence bound of the Spearman correlation.

        By Fisher's z with one degree of freedom per trajectory: points of one trajectory resemble each other.
        """
        if self.trajectories <= 3:
            return -1.0
        z = math.atanh(min(max(self.spearman, -0.999999), 0.999999))
        return math.tanh(z - 1.645 / math.sqrt(self.trajectories - 3))

    @property
    def trusted(self) -> bool:
        """Whether f may steer a model: its error at the best points leaves something of what they promise.

        It must also rank unseen points above chance and err less than the best constant.
        """
        return self.near_mae < self.headroom and self.spearman_lower > 0 and self.mae < self.constant_mae

    def __str__(self) -> str:
        """Say on one line whether f is to be trusted, and why."""
        better = f"{abs(self.headroom):.4f} {'better' if self.headroom >= 0 else 'worse'}"
        verdict = "to be trusted" if self.trusted else "NOT to be trusted, so do not follow it"
        where = "on held-out trajectories" if self.incumbent_mae is None else "before each query"
        return (
            f"{verdict}; tested {where}: Spearman {self.spearman:.2f} (lower 95% bound {self.spearman_lower:.2f}),"
            f" mean absolute error {self.mae:.4f} (of a constant {self.constant_mae:.4f}),"
            f" near its best points {self.near_mae:.4f} (these are {better} than the start)"
        )


class ValueFunction(nn.Module):
    """Base of all value functions; an ensemble of M members whose mean is f.

    Subclasses define only how members predict. Parameters are frozen and BatchNorm is in evaluation mode once fitted.

    Args:
        dim: Dimension d of phi.
        members: Ensemble size M.

    Attributes:
        centre: The middle of f's domain, ``d``: 0, or the end of the search that f comes from.
        radius: Distance from it below which 95% of the fitted phi lie; f should not be trusted much further out.
        gradient_floor: Length of grad f below which f counts as flat: 10% of the fitted points have a smaller one.
        quality: Held-out quality, None until measured.
        combination: How outcomes that f predicts make the metric; None where it predicts the metric itself.
        signature: The adapter whose phi f was fitted to, under which alone it is followed; None if unknown. Set it to
            None to follow f under another adapter all the same.
    """

    kind: ClassVar[str]
    all_directions: bool = False  # fitted to points in all directions, not along loss gradients
    centre: Tensor
    radius: Tensor
    gradient_floor: Tensor

    def __init__(self, dim: int, members: int = 1) -> None:
        super().__init__()
        self.dim: int = dim
        self.members_count: int = members
        self.arguments: dict[str, int] = {"dim": dim, "members": members}  # from which a file's f is made anew
        self.quality: Quality | None = None
        self.combination: Combination | None = None
        self.signature: Signature | None = None
        self.register_buffer("centre", torch.zeros(dim))
        self.register_buffer("radius", torch.tensor(math.inf))
        self.register_buffer("gradient_floor", torch.tensor(0.0))

    @abstractmethod
    def members(self, phi: Tensor) -> Tensor:
        """Predict the cost by each member, ``... x M``, float64, at phi, ``... x d``."""

    def forward(self, phi: Tensor) -> Tensor:
        """Predict the cost, ``...``, float64, at phi, ``... x d``."""
        return self.members(phi.to(self.radius.dtype)).mean(-1)

    def gradient(self, phi: Tensor) -> Tensor:
        """Return grad f, ``... x d``, at phi, ``... x d``."""
        with torch.enable_grad():
            point = phi.detach().to(self.radius.dtype).requires_grad_(True)
            (gradient,) = torch.autograd.grad(self(point).sum(), point)
        return gradient.to(phi.dtype)

    @property
    def trusted(self) -> bool:
        """Whether held-out quality shows skill; an f of unknown quality is not trusted."""
        return self.quality is not None and self.quality.trusted

    def check_fits(self, signature: Signature | None) -> None:
        """Reject an adapter whose phi means something else than what f was fitted to; what is unknown passes.

        Args:
            signature: The adapter's.

        Raises:
            ValueFunctionError: It is another adapter; the message says in what it differs first.
        """
        if self.signature is None or signature is None:
            return
        for what, fitted, attached in self.signature.differences(signature):
            raise ValueFunctionError(
                f"f was fitted for another adapter, whose {what} is {brief(fitted)}, not {brief(attached)}: attach that"
                " one, or learn f anew (to follow it all the same, as for a transfer, set f.signature = None)"
            )

    @torch.no_grad()
    def set_domain(self, phi: Tensor, centre: Tensor | None = None, reaching: Tensor | None = None) -> None:
        """Freeze f and derive its domain from the fitted points.

        Args:
            phi: The points, ``n x d``.
            centre: The middle of the domain, ``d``; 0 by default.
            reaching: A point, ``d``, that the domain must contain, as f will be followed from there.
        """
        self.eval().requires_grad_(False)
        if centre is not None:
            self.centre.copy_(centre)
        self.radius.copy_((phi - self.centre).norm(dim=-1).quantile(0.95))
        if reaching is not None:
            self.radius.clamp_(min=float((reaching - self.centre).norm()))
        self.gradient_floor.copy_(self.gradient(phi).norm(dim=-1).quantile(0.1))

    def save(self, path: str | Path) -> None:
        """Write f, its domain, its quality and the signature of its adapter to a safetensors file."""
        described: dict[str, Any] = {"kind": self.kind, "settings": self.arguments}
        described["quality"] = self.quality and asdict(self.quality)
        described["signature"] = self.signature and self.signature.to_json()
        described["combination"] = self.combination and self.combination.to_json()
        write_tensors(path, self.state_dict(), FILE_FORMAT, described)


class NeuralValueFunction(ValueFunction):
    """The paper's MLP d-64-32-32-16-1, BatchNorm and ReLU in every hidden layer, as an ensemble of M networks.

    The networks are computed together: a member is a slice of each layer's weight, with its own BatchNorm
    features. Costs are standardised internally.

    Args:
        dim: Dimension d of phi.
        members: Ensemble size M; 1 is the paper's f.
    """

    kind = "neural"
    WIDTHS = (64, 32, 32, 16)
    cost_mean: Tensor
    cost_std: Tensor

    def __init__(self, dim: int, members: int = 1) -> None:
        super().__init__(dim, members)
        widths = (dim, *self.WIDTHS)
        pairs = list(pairwise(widths))
        self.linears: nn.ModuleList = nn.ModuleList(MemberLinear(members, a, b) for a, b in pairs)
        self.norms: nn.ModuleList = nn.ModuleList(nn.BatchNorm1d(members * b) for _, b in pairs)
        self.head: MemberLinear = MemberLinear(members, widths[-1], 1)
        self.register_buffer("cost_mean", torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("cost_std", torch.tensor(1.0, dtype=torch.float64))

    @classmethod
    def drawn(cls, dim: int, members: int, rng: torch.Generator) -> "NeuralValueFunction":
        """Return an untrained f whose weights follow from a generator's seed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rng.initial_seed())
            return cls(dim, members)

    def standardise(self, cost: Tensor) -> None:
        """Take the mean and the standard deviation of costs, ``n``, as units of what the networks predict."""
        std = cost.double().std()
        self.cost_mean, self.cost_std = cost.double().mean(), std.where(std > 0, 1.0)

    def features(self, phi: Tensor) -> Tensor:
        """Return each member's embedding g, ``B x M x 16``, of what each member is given, ``B x M x d``."""
        h = phi
        for linear, norm in zip(self.linears, self.norms, strict=True):
            h = linear(h)
            h = norm(h.flatten(1)).view_as(h).relu()
        return h

    def predict(self, features: Tensor) -> Tensor:
        """Return the costs, ``B x M``, float64, from the embeddings, ``B x M x 16``."""
        return self.head(features).squeeze(-1).double() * self.cost_std + self.cost_mean  # type: ignore[no-any-return]

    def members(self, phi: Tensor) -> Tensor:
        """Predict the cost by each member, ``... x M``, at phi, ``... x d``."""
        flat = phi.reshape(-1, 1, self.dim).expand(-1, self.members_count, -1)
        return self.predict(self.features(flat)).view(*phi.shape[:-1], self.members_count)


class MemberLinear(nn.Module):
    """M independent linear layers: ``B x M x in`` to ``B x M x out``, initialised as ``nn.Linear`` is."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = inputs**-0.5
        self.weight: nn.Parameter = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias: nn.Parameter = nn.Parameter(torch.empty(members, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Apply member m's layer to the m-th slice."""
        return torch.einsum("bmi,mio->bmo", x, self.weight) + self.bias
