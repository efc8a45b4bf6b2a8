"""The controller of Adaptive Loss Alignment (Huang et al., 2019): its states, its network and how it learns."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metricopt_ext.siblings.ala.adaptive_losses import AdaptiveLoss
from metricopt_ext.utils.checks import check_integer
from metricopt_ext.utils.files import content_of, module_of, read_tensors, write_tensors

FILE_FORMAT = "metricopt_ext/loss_policy/1"
HIDDEN = (32, 32)  # ReLU units (section 5)
ACTIONS = (-1, 0, 1)  # in units of beta


class LossPolicy(nn.Module):
    """pi_theta: what to do with one loss parameter, given its state; all parameters share it.

    Its inputs do not depend on how many parameters there are, so a policy of one task serves another of more classes.

    Args:
        family: The family of losses that it is for.
        observed: Number k of statistics of a parameter.
        kinds: Number of parameters that it tells apart, 0 for none.
        history: Time steps whose statistics it sees.
    """

    def __init__(self, family: str, observed: int, kinds: int = 0, history: int = 10) -> None:
        super().__init__()
        check_integer(1, observed=observed, history=history)
        check_integer(0, kinds=kinds)
        self.family, self.observed, self.kinds, self.history = family, observed, kinds, history
        first, second = HIDDEN
        self.net = nn.Sequential(
            *(nn.Linear(self.inputs, first), nn.ReLU()),
            *(nn.Linear(first, second), nn.ReLU()),
            nn.Linear(second, len(ACTIONS)),
        )

    @classmethod
    def of(cls, loss: AdaptiveLoss, history: int = 10) -> "LossPolicy":
        """Return a policy with random weights for a loss."""
        return cls(loss.family, loss.observed, loss.kinds, history)

    @property
    def inputs(self) -> int:
        """Numbers in a state: the statistics' history and relative change, Phi(i), the time, and the kind."""
        return (self.history + 1) * self.observed + 2 + self.kinds

    def forward(self, states: Tensor) -> Tensor:
        """Return the log-probabilities of the actions -beta, 0 and beta, ``... x 3``, in states ``... x inputs``."""
        return F.log_softmax(self.net(states), -1)

    @torch.no_grad()
    def sample(self, states: Tensor, rng: torch.Generator) -> Tensor:
        """Draw an action for each parameter, ``u`` places in `ACTIONS`, in states ``u x inputs``."""
        return torch.multinomial(self(states).exp(), 1, generator=rng).squeeze(1)

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file; `load_loss_policy` reads it."""
        described = {name: getattr(self, name) for name in ("family", "observed", "kinds", "history")}
        write_tensors(path, self.state_dict(), FILE_FORMAT, described)


def load_loss_policy(path: str | Path) -> LossPolicy:
    """Read a policy that `LossPolicy.save` wrote.

    Raises:
        FileFormatError: The file is corrupt or holds something else.
    """
    tensors, described = read_tensors(path, FILE_FORMAT)
    with content_of(path, "policy that it describes"):
        return module_of(path, tensors, lambda: LossPolicy(**described))


class States:
    """What the controller sees of one model's loss parameters as time goes by (section 3.2).

    Args:
        loss: The loss.
        history: Time steps whose statistics are seen; before so many have passed, the first is repeated.
        decay: Of the statistics' moving average.
    """

    def __init__(self, loss: AdaptiveLoss, history: int, decay: float) -> None:
        self.loss, self.decay = loss, decay
        self.seen: deque[Tensor] = deque(maxlen=history)
        self.average: Tensor | None = None

    def observe(self, statistics: Tensor, parameters: Tensor, progress: float) -> Tensor:
        """Return the state of each parameter, ``u x inputs``, at the next time step.

        Args:
            statistics: S of each parameter, ``u x k``.
            parameters: Phi, ``u``.
            progress: The share of the training run that is over, in [0, 1].
        """
        s = statistics.detach().to("cpu", torch.float32)
        if self.average is None:
            self.average = s
            self.seen.extend([s] * (self.seen.maxlen or 1))
        self.seen.appendleft(s)
        phi = parameters.to(s)[:, None]
        kinds = [torch.eye(self.loss.kinds)] if self.loss.kinds else []
        state = torch.cat(
            [*self.seen, relative_change(s, self.average), phi, torch.full_like(phi, progress), *kinds], dim=1
        )
        self.average = self.decay * self.average + (1 - self.decay) * s
        return state


def relative_change(value: Tensor, average: Tensor) -> Tensor:
    """Return (value - average) / (|value| + |average|), within [-1, 1], 0 where both are 0."""
    return (value - average) / (value.abs() + average.abs()).clamp(min=torch.finfo(value.dtype).tiny)


class Episode(NamedTuple):
    """An episode of one step (T = 1).

    Attributes:
        states: s_t of each loss parameter, ``u x inputs``.
        choices: a_t, ``u`` places in `ACTIONS`.
        advantage: r_t - b_t.
    """

    states: Tensor
    choices: Tensor
    advantage: float


class Reinforce:
    """REINFORCE with a moving baseline and a short memory (Eq. 3 with T = 1, Algorithm 1).

    Args:
        policy: What learns.
        lr: Adam's rate.
        memory: Time steps whose episodes are remembered.
        decay: Of the rewards' moving average.

    Attributes:
        baseline: b_t, the exponential moving average of the rewards before time t, 0 at first.
    """

    def __init__(self, policy: LossPolicy, lr: float, memory: int, decay: float) -> None:
        self.policy, self.decay, self.baseline = policy, decay, 0.0
        self.memory: deque[list[Episode]] = deque(maxlen=memory)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=lr) if lr else None

    def remember(self, states: Sequence[Tensor], choices: Sequence[Tensor], rewards: Sequence[float]) -> None:
        """Store what the children did at a time step, and move the baseline to the mean of their rewards."""
        b = self.baseline
        self.memory.append([Episode(s, a, r - b) for s, a, r in zip(states, choices, rewards, strict=True)])
        self.baseline = self.decay * b + (1 - self.decay) * sum(rewards) / len(rewards)

    def update(self, rng: torch.Generator) -> None:
        """Take a step on as many episodes, drawn from the memory, as there are children."""
        episodes = [episode for step in self.memory for episode in step]
        chosen = torch.randperm(len(episodes), generator=rng)[: len(self.memory[-1])].tolist()
        if self.optimizer is None:
            return
        self.optimizer.zero_grad()
        reinforce_loss(self.policy, [episodes[i] for i in chosen]).backward()
        self.optimizer.step()


def reinforce_loss(policy: LossPolicy, episodes: Sequence[Episode]) -> Tensor:
    """Return what has minus the gradient of Eq. 3, a scalar: the mean over episodes of -(r - b) log pi(a|s).

    An action changes all loss parameters at once, each independently of the others, so log pi(a|s) is a sum over them.
    """
    states, choices = (torch.stack(each) for each in list(zip(*episodes, strict=True))[:2])
    advantages = torch.tensor([episode.advantage for episode in episodes], dtype=states.dtype)
    log_pi = policy(states).gather(-1, choices[..., None]).squeeze(-1).sum(-1)
    loss: Tensor = -(advantages * log_pi).mean()
    return loss
