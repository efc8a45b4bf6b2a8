"""What is done to embeddings before they are searched: PCA whitening, lengths of 1, mixing with their neighbours."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.neighbours import DISTANCES
from metricopt_ext.retrieval.vectors import NUMBERS, chunks
from metricopt_ext.utils.checks import check_at_least, check_integer

COVARIANCES = ("all", "within")

POWER = 3.0  # of the cosine similarity, by which a neighbour counts


@dataclass(frozen=True)
class PostProcessing:
    """What is done to embeddings, in this order, each time with a scaling to length 1 afterwards; by default nothing.

    Attributes:
        whitening: Power p of a PCA whitening, in [0, 1]: each principal component is divided by its standard deviation
            to the power of p. 0 whitens nothing, and rotates nothing; 1 gives all components the variance 1.
        covariance: Whose principal components these are: ``"all"`` embeddings', or those ``"within"`` classes
            (`Whitening.within`).
        augmentation: Database augmentation: each gallery item becomes its mean with so many of its nearest neighbours
            in the gallery, weighted by ``similarity ** 3``; 0 for none (Arandjelovic and Zisserman, CVPR 2012).

    Raises:
        ValueError: A number is out of range.
    """

    whitening: float = 0.0
    covariance: str = "all"
    augmentation: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_integer(0, augmentation=self.augmentation)
        check_at_least(0, whitening=self.whitening)
        if self.whitening > 1:
            raise ValueError(f"whitening is {self.whitening}; it must be from 0 to 1")
        if self.covariance not in COVARIANCES:
            raise ValueError(f"covariance is {self.covariance!r}; it must be one of {', '.join(COVARIANCES)}")


class Whitening(NamedTuple):
    """Principal components of embeddings, in float64.

    Directions in which the embeddings do not vary, but for rounding, are left out: r components of d dimensions.

    Attributes:
        mean: ``d``.
        axes: ``d x r``, orthonormal columns.
        variances: ``r``, of the components, descending and above 0.
        rows: How many embeddings they are of.
    """

    mean: Tensor
    axes: Tensor
    variances: Tensor
    rows: int

    @classmethod
    def of(cls, embeddings: Tensor) -> "Whitening":
        """Find the principal components of embeddings, ``n x d``.

        Raises:
            DataError: They are fewer than two, are not finite, or are all the same.
        """
        if embeddings.dim() != 2 or len(embeddings) < 2:
            raise DataError(f"a whitening is fitted on n x d embeddings, n at least 2, got {tuple(embeddings.shape)}")
        x = embeddings.detach().cpu().double()
        if not x.isfinite().all():
            raise DataError("a whitening is fitted on finite embeddings, got NaN or infinity")
        mean = x.mean(0)
        return cls._of_covariance(mean, (x - mean).T @ (x - mean) / (len(x) - 1), embeddings.dtype, len(x))

    @classmethod
    def within(cls, *parts: tuple[Tensor, Tensor]) -> "Whitening":
        """Find the principal components of embeddings about the means of their classes, of several parts on average.

        Whitened by them at the power of 1, the covariance within classes is the identity: distances are those of linear
        discriminant analysis in all dimensions (Mikolajczyk & Matas, ICCV 2007, section 3). The mean is the last
        part's; ``rows`` are the parts' embeddings less their classes.

        Args:
            parts: Embeddings, ``n x d``, and their classes, ``n`` integers; of other classes each.

        Raises:
            DataError: There are not as many labels, or the embeddings of no class differ; or as from `of`.
        """
        covariances, rows = list[Tensor](), 0
        for embeddings, labels in parts:
            x, (classes, places) = embeddings.detach().cpu().double(), labels.cpu().unique(return_inverse=True)
            if places.shape != x.shape[:1]:
                raise DataError(f"there are {len(x)} embeddings, but {len(places)} labels")
            means = torch.zeros(len(classes), x.shape[1], dtype=x.dtype).index_add_(0, places, x)
            apart = x - (means / places.bincount()[:, None])[places]
            covariances.append(apart.T @ apart / (len(x) - 1))
            rows += len(x) - len(classes)
        return cls._of_covariance(x.mean(0), torch.stack(covariances).mean(0), embeddings.dtype, rows)

    @classmethod
    def _of_covariance(cls, mean: Tensor, covariance: Tensor, dtype: torch.dtype, rows: int) -> "Whitening":
        """Find the principal components by a mean, ``d``, and a covariance, ``d x d``, of embeddings of a type."""
        variances, axes = torch.linalg.eigh(covariance)
        variances, axes = variances.flip(0), axes.flip(1)
        unit = torch.finfo(dtype).eps if dtype.is_floating_point else torch.finfo(mean.dtype).eps
        # What rounding of the embeddings' numbers makes of an exact 0 in a sum over d of them, and float64's own in one
        # over the rows, whose errors grow as a random walk.
        rounded = len(mean) * unit**2 * (float(variances[0]) + float(mean.square().max()))
        least = max(rounded, (len(mean) + rows**0.5) * torch.finfo(mean.dtype).eps * float(variances[0]))
        rank = int((variances > least).sum())
        if not rank or float(variances[0]) <= (unit * float(mean.norm())) ** 2:
            raise DataError(f"a whitening is fitted on embeddings that differ, got {rows} that are all the same")
        return cls(mean, axes[:, :rank], variances[:rank], rows)

    def projection(self, power: float) -> Tensor:
        """Return the matrix, ``d x r``, that centred embeddings are multiplied by.

        Args:
            power: Of the whitening, in [0, 1].

        Raises:
            DataError: There are no more embeddings than dimensions.
        """
        if self.rows <= len(self.mean):
            raise DataError(
                f"a whitening of {len(self.mean)} dimensions is fitted on {self.rows} embeddings; it must be more of"
                " them than dimensions"
            )
        return self.axes * self.variances ** (-power / 2)

    def applied(self, embeddings: Tensor, power: float) -> Tensor:
        """Return whitened embeddings, ``n x r``, of the type of those given, ``n x d``; see `projection`.

        Raises:
            DataError: As from `projection`; or they have another dimension than those that it was fitted on.
        """
        if embeddings.shape[1] != len(self.mean):
            raise DataError(
                f"a whitening of {len(self.mean)} dimensions is for embeddings of as many, got {embeddings.shape[1]}"
            )
        centred = embeddings.double() - self.mean.to(embeddings.device)
        return (centred @ self.projection(power).to(embeddings.device)).to(embeddings.dtype)


def post_processed(
    embeddings: Tensor, post: PostProcessing, whitening: Whitening | None = None, queries: Tensor | None = None
) -> Tensor:
    """Return embeddings as they are searched, ``n x D``, of the type of those given.

    Args:
        embeddings: ``n x d``, on the CPU; they stay as they are.
        post: What is done to them; by default nothing, and they are returned themselves.
        whitening: Principal components, if they are whitened.
        queries: Which of them are queries, ``n`` booleans, and the others their gallery; None if each searches all
            others. Then none may be mixed: what a query finds must be made without it (`left_out.LeftOut`).

    Raises:
        ValueError: Principal components are missing, or embeddings that search each other are to be mixed.
        DataError: As from `Whitening.applied`.
    """
    found = each_alone(embeddings, post, whitening)
    if post.augmentation:
        if queries is None:
            raise ValueError("embeddings that search each other are not mixed with their neighbours; see LeftOut")
        found = found.clone()
        found[~queries] = unit(augmented(found[~queries], post.augmentation))
    return found


def each_alone(embeddings: Tensor, post: PostProcessing, whitening: Whitening | None = None) -> Tensor:
    """Return what is made of each embedding by itself, before any is mixed with others; see `post_processed`."""
    if not post.whitening:
        return embeddings
    if whitening is None:
        raise ValueError("a whitening needs principal components, Whitening.of(embeddings), of other inputs")
    return unit(whitening.applied(embeddings, post.whitening))


def augmented(gallery: Tensor, k: int) -> Tensor:
    """Return gallery items, ``m x d``, each the mean of itself and its k nearest others; see `PostProcessing`."""
    return mixed(gallery, gallery, neighbours(gallery, min(k, len(gallery) - 1)))


def mixed(vectors: Tensor, items: Tensor, near: Tensor) -> Tensor:
    """Return vectors, each the weighted mean of itself, with weight 1, and of its neighbours, with ``cosine ** 3``.

    The weight of a neighbour of negative cosine is 0.

    Args:
        vectors: ``n x d``.
        items: What has the neighbours, ``m x d``.
        near: Rows of each one's neighbours among the items, ``n x k``.
    """
    found = torch.empty_like(vectors)
    of_one = F.normalize(items.double())
    for part in chunks(len(vectors), max(1, NUMBERS // (max(1, near.shape[1]) * items.shape[1]))):
        own = vectors[part].double()
        similarity = torch.einsum("nd,nkd->nk", F.normalize(own), of_one[near[part]])
        weights = similarity.clamp(min=0) ** POWER * (similarity > 0)
        total = own + torch.einsum("nk,nkd->nd", weights, items[near[part]].double())
        found[part] = (total / (1 + weights.sum(1, keepdim=True))).to(found.dtype)
    return found


def neighbours(vectors: Tensor, k: int) -> Tensor:
    """Return the rows of the k others of the largest cosine of each, ``n x k``, nearest first.

    Args:
        vectors: ``n x d``, on the CPU.
        k: At most n - 1.

    Raises:
        DataError: A vector is 0.
    """
    if k < 1:
        return torch.empty(len(vectors), 0, dtype=torch.long)
    if not bool(vectors.any(1).all()):
        raise DataError("embeddings must not be 0 to be mixed with their neighbours by cosine, got one that is")
    of_one = F.normalize(vectors.double())
    found = torch.empty(len(vectors), k, dtype=torch.long)
    for part in chunks(len(vectors), max(1, DISTANCES // len(vectors))):
        similarity = F.normalize(vectors[part].double()) @ of_one.T
        similarity.diagonal(part.start).fill_(-torch.inf)
        found[part] = similarity.topk(k).indices
    return found


def unit(vectors: Tensor) -> Tensor:
    """Return vectors, ``n x d``, scaled to length 1; one that is 0 stays so."""
    return F.normalize(vectors.double()).to(vectors.dtype)
