"""What is done to embeddings before they are searched: PCA whitening, lengths of 1, mixing with their neighbours."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from metricopt_ext.errors import DataError
from metricopt_ext.retrieval.neighbours import DISTANCES
from metricopt_ext.retrieval.vectors import NUMBERS, chunks
from metricopt_ext.utils.checks import check_at_least, check_integer


@dataclass(frozen=True)
class PostProcessing:
    """What is done to embeddings, in this order; by default nothing.

    Attributes:
        whitening: Power p of a PCA whitening, in [0, 1]: each principal component is divided by its standard deviation
            to the power of p. 0 whitens nothing, and rotates nothing; 1 gives all components the variance 1.
        dimension: How many principal components are kept, those of the largest variance; 0 for all.
        l2_before: Whether embeddings are scaled to length 1 before that.
        l2_after: Whether they are after the whitening, after the augmentation and after the expansion, if there are.
        augmentation: Database augmentation: each gallery item becomes its mean with so many of its nearest neighbours
            in the gallery, weighted by ``similarity ** alpha``; 0 for none (Arandjelovic and Zisserman, CVPR 2012).
        expansion: Alpha query expansion: each query becomes its mean with so many of its nearest items, weighted alike;
            0 for none (Radenovic et al., TPAMI 2018). It takes a second search.
        alpha: The power of the cosine similarity, negative ones being 0; at least 0.
        distance: What neighbours are compared by; None for the metric's own.

    Raises:
        ValueError: A number is out of range, or there is no such distance.
    """

    whitening: float = 0.0
    dimension: int = 0
    l2_before: bool = False
    l2_after: bool = True
    augmentation: int = 0
    expansion: int = 0
    alpha: float = 3.0
    distance: Literal["l2", "cosine"] | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_integer(0, dimension=self.dimension, augmentation=self.augmentation, expansion=self.expansion)
        check_at_least(0, whitening=self.whitening, alpha=self.alpha)
        if self.whitening > 1:
            raise ValueError(f"whitening is {self.whitening}; it must be from 0 to 1")
        if self.distance not in (None, "l2", "cosine"):
            raise ValueError(f"distance is {self.distance!r}; it must be l2, cosine or None")

    @property
    def projects(self) -> bool:
        """Whether it needs principal components."""
        return self.whitening > 0 or self.dimension > 0

    @property
    def mixes(self) -> bool:
        """Whether it mixes embeddings with their neighbours."""
        return self.augmentation > 0 or self.expansion > 0

    @property
    def acts(self) -> bool:
        """Whether it does anything at all."""
        return self.projects or self.mixes or self.l2_before or self.distance is not None


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
        variances, axes = torch.linalg.eigh((x - mean).T @ (x - mean) / (len(x) - 1))
        variances, axes = variances.flip(0), axes.flip(1)
        unit = torch.finfo(embeddings.dtype).eps if embeddings.is_floating_point() else torch.finfo(x.dtype).eps
        # What rounding of the embeddings' numbers makes of an exact 0 in a sum over d of them, and float64's own.
        rounded = x.shape[1] * unit**2 * (float(variances[0]) + float(mean.square().max()))
        least = max(rounded, x.shape[1] * torch.finfo(x.dtype).eps * float(variances[0]))
        rank = int((variances > least).sum())
        if not rank or float(variances[0]) <= (unit * float(mean.norm())) ** 2:
            raise DataError(f"a whitening is fitted on embeddings that differ, got {len(x)} that are all the same")
        return cls(mean, axes[:, :rank], variances[:rank], len(x))

    @classmethod
    def within(cls, embeddings: Tensor, labels: Tensor) -> "Whitening":
        """Find the principal components of embeddings, ``n x d``, about the means of their classes, ``n`` integers.

        Whitened by them at the power of 1, the covariance within classes is the identity: distances are those of linear
        discriminant analysis in all dimensions (Mikolajczyk & Matas, ICCV 2007, section 3). ``rows`` is n less the
        number of classes.

        Raises:
            DataError: There are not as many labels, or the embeddings of no class differ; or as from `of`.
        """
        x, (classes, places) = embeddings.detach().cpu().double(), labels.cpu().unique(return_inverse=True)
        if places.shape != x.shape[:1]:
            raise DataError(f"there are {len(x)} embeddings, but {len(places)} labels")
        means = torch.zeros(len(classes), x.shape[1], dtype=x.dtype).index_add_(0, places, x)
        within = cls.of((x - (means / places.bincount()[:, None])[places]).to(embeddings.dtype))
        return within._replace(mean=x.mean(0), rows=len(x) - len(classes))

    def projection(self, power: float, dimension: int = 0) -> Tensor:
        """Return the matrix, ``d x D``, that centred embeddings are multiplied by.

        Args:
            power: Of the whitening, in [0, 1].
            dimension: D, of the components that are kept; 0 for all, r.

        Raises:
            DataError: There are fewer components; or no more embeddings than dimensions, none of which is left out.
        """
        if dimension > len(self.variances):
            raise DataError(
                f"dimension={dimension} of embeddings that have {len(self.variances)} principal components; take fewer"
            )
        if not dimension and self.rows <= len(self.mean):
            raise DataError(
                f"a whitening of {len(self.mean)} dimensions is fitted on {self.rows} embeddings; it must be more of"
                " them than dimensions, or dimension=D for fewer components"
            )
        kept = dimension or len(self.variances)
        return self.axes[:, :kept] * self.variances[:kept] ** (-power / 2)

    def applied(self, embeddings: Tensor, power: float, dimension: int = 0) -> Tensor:
        """Return whitened embeddings, ``n x D``, of the type of those given, ``n x d``; see `projection`.

        Raises:
            DataError: As from `projection`; or they have another dimension than those that it was fitted on.
        """
        if embeddings.shape[1] != len(self.mean):
            raise DataError(
                f"a whitening of {len(self.mean)} dimensions is for embeddings of as many, got {embeddings.shape[1]}"
            )
        centred = embeddings.double() - self.mean.to(embeddings.device)
        return (centred @ self.projection(power, dimension).to(embeddings.device)).to(embeddings.dtype)


def post_processed(
    embeddings: Tensor, post: PostProcessing, whitening: Whitening | None = None, queries: Tensor | None = None
) -> Tensor:
    """Return embeddings as they are searched, ``n x D``, of the type of those given.

    Args:
        embeddings: ``n x d``, on the CPU; they stay as they are.
        post: What is done to them; by default nothing, and they are returned themselves.
        whitening: Principal components, if it needs them (`PostProcessing.projects`).
        queries: Which of them are queries, ``n`` booleans, and the others their gallery; None if each searches all
            others. Then none may be mixed: what a query finds must be made without it (`left_out.LeftOut`).

    Raises:
        ValueError: Principal components are missing, or embeddings that search each other are to be mixed.
        DataError: As from `Whitening.applied`; or an embedding that is compared by cosine is 0.
    """
    found = each_alone(embeddings, post, whitening)
    if post.mixes:
        if queries is None:
            raise ValueError("embeddings that search each other are not mixed with their neighbours; see LeftOut")
        found, gallery = found.clone(), found[~queries]
        if post.augmentation:
            found[~queries] = gallery = unit_if(post.l2_after, augmented(gallery, post.augmentation, post.alpha))
        if post.expansion:
            mixed = expanded(found[queries], gallery, post.expansion, post.alpha)
            found[queries] = unit_if(post.l2_after, mixed)
    return unit_if(post.distance == "cosine", found)


def each_alone(embeddings: Tensor, post: PostProcessing, whitening: Whitening | None = None) -> Tensor:
    """Return what is made of each embedding by itself, before any is mixed with others; see `post_processed`."""
    found = unit_if(post.l2_before, embeddings)
    if post.projects:
        if whitening is None:
            raise ValueError("a whitening needs principal components, Whitening.of(embeddings), of other inputs")
        found = unit_if(post.l2_after, whitening.applied(found, post.whitening, post.dimension))
    return found


def augmented(gallery: Tensor, k: int, alpha: float) -> Tensor:
    """Return gallery items, ``m x d``, each the mean of itself and its k nearest others; see `PostProcessing`."""
    return mixed(gallery, gallery, neighbours(gallery, gallery, min(k, len(gallery) - 1), own=True), alpha)


def expanded(queries: Tensor, gallery: Tensor, k: int, alpha: float) -> Tensor:
    """Return queries, ``n x d``, each the mean of itself and its k nearest of the gallery; see `PostProcessing`."""
    return mixed(queries, gallery, neighbours(queries, gallery, min(k, len(gallery)), own=False), alpha)


def mixed(vectors: Tensor, items: Tensor, near: Tensor, alpha: float) -> Tensor:
    """Return vectors, each the weighted mean of itself, with weight 1, and of its neighbours.

    Args:
        vectors: ``n x d``.
        items: What has the neighbours, ``m x d``.
        near: Rows of each one's neighbours among the items, ``n x k``.
        alpha: A neighbour's weight is ``cosine ** alpha``, 0 for a negative one.
    """
    found = torch.empty_like(vectors)
    unit = F.normalize(items.double())
    for part in chunks(len(vectors), max(1, NUMBERS // (max(1, near.shape[1]) * items.shape[1]))):
        own = vectors[part].double()
        similarity = torch.einsum("nd,nkd->nk", F.normalize(own), unit[near[part]])
        weights = similarity.clamp(min=0) ** alpha * (similarity > 0)
        total = own + torch.einsum("nk,nkd->nd", weights, items[near[part]].double())
        found[part] = (total / (1 + weights.sum(1, keepdim=True))).to(found.dtype)
    return found


def neighbours(vectors: Tensor, items: Tensor, k: int, own: bool) -> Tensor:
    """Return the rows of the k items of the largest cosine, ``n x k``, nearest first.

    Args:
        vectors: ``n x d``, on the CPU.
        items: ``m x d``.
        k: At most m, or m - 1 of items that are the vectors.
        own: Whether the items are the vectors; none is its own neighbour.

    Raises:
        DataError: A vector or an item is 0.
    """
    if k < 1:
        return torch.empty(len(vectors), 0, dtype=torch.long)
    if not all(bool(each.any(1).all()) for each in (vectors, items)):
        raise DataError("embeddings must not be 0 to be mixed with their neighbours by cosine, got one that is")
    unit = F.normalize(items.double())
    found = torch.empty(len(vectors), k, dtype=torch.long)
    for part in chunks(len(vectors), max(1, DISTANCES // len(items))):
        similarity = F.normalize(vectors[part].double()) @ unit.T
        if own:
            similarity.diagonal(part.start).fill_(-torch.inf)
        found[part] = similarity.topk(k).indices
    return found


def unit_if(condition: bool, vectors: Tensor) -> Tensor:
    """Return vectors, ``n x d``, scaled to length 1 under a condition; one that is 0 stays so."""
    return F.normalize(vectors.double()).to(vectors.dtype) if condition else vectors
