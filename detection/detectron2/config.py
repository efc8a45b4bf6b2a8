"""Our part of a Detectron2 config: the node METRICOPT, each of its nodes a dataclass here, its keys in lower case."""

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from detectron2.config import CfgNode, get_cfg

from metricopt_ext.detection.ap_loss import ClassificationLoss
from metricopt_ext.detection.matching import Definition
from metricopt_ext.detection.scenes import SceneShift, write_scenes
from metricopt_ext.errors import ConfigError, MetricOptError
from metricopt_ext.methods.paper.recipe import LEAST_TASKS
from metricopt_ext.search.optimizer import MetricOpt
from metricopt_ext.search.trust_region import GuidedTrustRegion
from metricopt_ext.utils.config import COMMAND_LINE, DEFAULT, FILE, check_yaml, config_section, default_of
from metricopt_ext.utils.files import MISFITS
from metricopt_ext.utils.packaged import find_config
from metricopt_ext.utils.shown_config import in_yaml
from metricopt_ext.utils.words import nearest

Node = TypeVar("Node")
PART = re.compile(r"data\.(?P<name>train|val|test)=(?P<path>.+)", re.DOTALL)
# What a part of one's own takes the place of.
OF_PARTS = {"train": "DATASETS.TRAIN", "val": "METRICOPT.METRIC.SET", "test": "DATASETS.TEST"}


def _check_least(least: int, node: str = "", **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ConfigError(f"METRICOPT.{node}{name.upper()} is {value}; it must be a finite number")
        if value < least:
            raise ConfigError(f"METRICOPT.{node}{name.upper()} is {value}; it must be at least {least}")


def _check_choice(choices: Any, node: str = "", **values: str) -> None:
    for name, value in values.items():
        if value not in get_args(choices):
            raise ConfigError(f"METRICOPT.{node}{name.upper()} is {value!r}; it must be one of {get_args(choices)}")


@dataclass(frozen=True)
class ScenesNode:
    """METRICOPT.DATASETS.SCENES: the scenes of `scenes.write_scenes`, to try detectors without a download.

    Attributes:
        folder: Where they are written to if they are not there yet, below DATASETS.ROOT if relative; empty writes none.
        images: Numbers of scenes in the splits train, val and test, each at least 1.
        shift: How val and test differ from train, see `scenes.SceneShift`; by default not at all.
        seed: Draws the scenes, at least 0.
    """

    folder: str = ""
    images: tuple[int, int, int] = default_of(write_scenes, "images")
    shift: SceneShift = field(default=SceneShift())
    seed: int = default_of(write_scenes, "seed")


@dataclass(frozen=True)
class DatasetsNode:
    """METRICOPT.DATASETS: sets that are entered into Detectron2's catalog, where DATASETS and METRIC.SET name them.

    Attributes:
        register: ``NAME=FOLDER:SPLIT`` and the like, see `registered.register_entries`; empty registers none.
        root: Where relative folders are.
        classes: Names of the classes of VOC folders; empty for all that a folder's annotations name.
        train: A part of one's own in place of DATASETS.TRAIN, see `registered.register_parts`; empty for none.
        val: The same in place of METRIC.SET.
        test: The same in place of DATASETS.TEST.
        scenes: The node SCENES.
    """

    register: tuple[str, ...] = ()
    root: str = "datasets"
    classes: tuple[str, ...] = ()
    train: str = ""
    val: str = ""
    test: str = ""
    scenes: ScenesNode = ScenesNode()


@dataclass(frozen=True)
class FilmNode:
    """METRICOPT.FILM: where phi acts.

    Attributes:
        layers: Names of `placements.PLACEMENTS`, or patterns of module names.
        dim: Dimension d of phi, at least 1.
    """

    layers: tuple[str, ...] = ("backbone",)
    dim: int = 128

    def __post_init__(self) -> None:
        _check_least(1, "FILM.", dim=self.dim)


@dataclass(frozen=True)
class MetricNode:
    """METRICOPT.METRIC: AP50, by which a detector is judged and phi is tuned, or another of an evaluator's results.

    Attributes:
        name: Which of the results phi is tuned for: ``bbox/AP50``, ``bbox/AP`` or ``bbox/AP75``, or those of masks,
            ``segm/AP50`` and the like, by Detectron2's ``COCOEvaluator``.
        definition: Of boxes: ``coco``, ``voc_11_point`` or ``voc`` (all points).
        set: Name of the set that AP50 is evaluated on during finetuning; empty evaluates nothing. Hold it out of both
            training and test.
        images: How many of its images, at least 0, drawn by SEED; 0 for all.
        evals: How many of the T + 1 points of a run AP50 is evaluated at, both ends included: from 2 to T + 1.
    """

    name: str = "bbox/AP50"
    definition: Definition = "coco"
    set: str = ""
    images: int = 0
    evals: int = 10

    def __post_init__(self) -> None:
        if not all(self.name.partition("/")):
            raise ConfigError(f"METRICOPT.METRIC.NAME is {self.name!r}; it must be like bbox/AP50 or segm/AP")
        _check_choice(Definition, "METRIC.", definition=self.definition)
        _check_least(0, "METRIC.", images=self.images)
        _check_least(2, "METRIC.", evals=self.evals)


@dataclass(frozen=True)
class FinetuneNode:
    """METRICOPT.FINETUNE: the run that tunes phi, see `MetricOpt`.

    Attributes:
        start_std: Standard deviation of phi's start, at least 0; 0 starts from the model as it was trained.
        value_function: File of f, which MetricOpt then follows; empty follows the loss alone.
        steps: Number T of steps, at least 1, in place of SOLVER.MAX_ITER.
        lr: Rate of the loss step, at least 0, constant: the solver's schedule and gradient clipping are for ordinary
            training.
        metric_step: Length of the first metric step in units of f's data radius, at least 0.
        loss_weight: Weight of the loss step beside the metric step, at least 0.
        trust: Trust radius in units of f's data radius, above 0.
        history: Number of past loss gradients that guide the search, at least 1.
        update_rule: File of a learned optimizer (`LearnedOptimizer`), which then moves phi at its own rate;
            VALUE_FUNCTION must be empty. It should see neither loss nor metric: the trainer tells it neither.
    """

    start_std: float = 0.0
    value_function: str = ""
    steps: int = 200
    lr: float = default_of(MetricOpt, "lr")
    metric_step: float = default_of(MetricOpt, "metric_step")
    loss_weight: float = default_of(MetricOpt, "loss_weight")
    trust: float = default_of(MetricOpt, "trust")
    history: int = default_of(MetricOpt, "history")
    update_rule: str = ""

    def __post_init__(self) -> None:
        _check_least(0, "FINETUNE.", start_std=self.start_std, lr=self.lr)
        _check_least(0, "FINETUNE.", metric_step=self.metric_step, loss_weight=self.loss_weight)
        _check_least(1, "FINETUNE.", steps=self.steps, history=self.history)
        if not self.trust > 0:
            raise ConfigError(f"METRICOPT.FINETUNE.TRUST is {self.trust}; it must be above 0")
        if self.update_rule and self.value_function:
            raise ConfigError(
                f"METRICOPT.FINETUNE.UPDATE_RULE is {self.update_rule!r} and VALUE_FUNCTION {self.value_function!r}; a"
                " learned optimizer follows no value function: give one of them"
            )


@dataclass(frozen=True)
class MetaNode:
    """METRICOPT.META: meta-training, whose runs learn f, and what each of them sets anew.

    Attributes:
        trajectories: Folder that a run's trajectory is added to, for fitting f. Empty keeps none; meta-training then
            has them in OUTPUT_DIR/trajectories.
        rounds: Number of rounds, at least 1: the first follows the loss alone, each later one the f fitted so far.
            More than `Recipe` has: with few tasks in each, a detector's f needs to be corrected more often.
        tasks: Runs in each round, at least 4.
        round: The run's round: 0 follows an f that is to be trusted, or else the loss alone; later ones follow any f,
            to correct it.
        index: The run's index, at least 0, which draws its start and batches; another one for each run.
    """

    trajectories: str = ""
    rounds: int = 7
    tasks: int = LEAST_TASKS
    round: int = 0
    index: int = 0

    def __post_init__(self) -> None:
        _check_least(1, "META.", rounds=self.rounds)
        _check_least(LEAST_TASKS, "META.", tasks=self.tasks)
        _check_least(0, "META.", round=self.round, index=self.index)


@dataclass(frozen=True)
class SearchNode:
    """METRICOPT.SEARCH: a guided search, which learns f from one start on.

    Attributes:
        queries: How often AP50 is evaluated, at least 1; the search says how many more it needs.
        keep_gib: Memory for the backbone's maps and proposals of images, where phi can't change them, in GiB, at least
            0; what no longer fits is computed for each query.
        batch: Queries between two fits, at least 1.
    """

    queries: int = 100
    keep_gib: float = 4.0
    batch: int = GuidedTrustRegion.batch

    def __post_init__(self) -> None:
        _check_least(1, "SEARCH.", queries=self.queries)
        _check_least(0, "SEARCH.", keep_gib=self.keep_gib)
        self.build()

    def build(self) -> GuidedTrustRegion:
        """Return the search.

        Raises:
            ConfigError: A value is out of range.
        """
        with config_section("METRICOPT.SEARCH"):
            return GuidedTrustRegion(self.batch)


@dataclass(frozen=True)
class Settings:
    """METRICOPT.

    Attributes:
        enabled: Whether phi is finetuned; False is ordinary training.
        soup: How many checkpoints an ordinary training keeps, its last, over its second half at most; and how many a
            search averages as a start, those beside MODEL.WEIGHTS. 0 for none; a training keeps all then.
        seed: At least 0; draws FiLM's matrices, the start, the observed steps, METRIC.IMAGES and what steps sample.
        classification_loss: Of the box head, in ordinary training too: the detector's own ``cross_entropy``, or ``ap``
            (`ap_loss.ap_loss`).
        datasets: The node DATASETS.
        film: The node FILM.
        metric: The node METRIC.
        finetune: The node FINETUNE.
        meta: The node META.
        search: The node SEARCH.

    Raises:
        ConfigError: A value is out of range, or a key lacks another one; those of the nodes raise it too.
    """

    enabled: bool = False
    soup: int = 0
    seed: int = 0
    classification_loss: ClassificationLoss = "cross_entropy"
    datasets: DatasetsNode = DatasetsNode()
    film: FilmNode = FilmNode()
    metric: MetricNode = MetricNode()
    finetune: FinetuneNode = FinetuneNode()
    meta: MetaNode = MetaNode()
    search: SearchNode = SearchNode()

    def __post_init__(self) -> None:
        """Check the keys against each other."""
        _check_least(0, seed=self.seed, soup=self.soup)
        if self.soup == 1:
            raise ConfigError("METRICOPT.SOUP is 1; it must be at least 2 checkpoints, or 0")
        _check_choice(ClassificationLoss, classification_loss=self.classification_loss)
        if self.metric.evals > self.finetune.steps + 1:
            raise ConfigError(
                f"METRICOPT.METRIC.EVALS is {self.metric.evals}; it must be at most METRICOPT.FINETUNE.STEPS + 1 ="
                f" {self.finetune.steps + 1}"
            )
        if self.meta.trajectories and not self.metric.set:
            raise ConfigError(
                "METRICOPT.META.TRAJECTORIES needs METRICOPT.METRIC.SET, the set that AP50 is evaluated on; hold it out"
                " of both training and test"
            )


def add_metricopt_config(cfg: CfgNode) -> None:
    """Add the node METRICOPT, with the defaults of `Settings`."""
    cfg.METRICOPT = _as_node(Settings())


def metricopt_settings(cfg: CfgNode) -> Settings:
    """Return the node METRICOPT as settings.

    Raises:
        ConfigError: A value is impossible.
        DataError: The shift of the scenes is impossible.
    """
    return _as_settings(cfg.METRICOPT, Settings())


def _as_node(settings: Any) -> CfgNode:
    values = vars(settings).items()
    return CfgNode({name.upper(): _as_node(value) if is_dataclass(value) else value for name, value in values})


def _as_settings(node: CfgNode, defaults: Node) -> Node:
    values = {name.lower(): value for name, value in node.items()}
    for name, value in values.items():
        if isinstance(value, CfgNode):
            values[name] = _as_settings(value, getattr(defaults, name))
    return replace(defaults, **values)  # type: ignore[type-var]


ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, power: float(base) ** power,  # which overflows where integers would grow for hours
}


@contextmanager
def _lists_computed() -> Iterator[None]:
    """Have YAML compute lists that a file writes as Python's, as Detectron2's RetinaNet its anchors; no code is run."""
    tag = "tag:yaml.org,2002:python/object/apply:eval"

    def compute(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Any:
        text = str(loader.construct_sequence(node)[0])
        try:
            return _computed(ast.parse(text.strip(), mode="eval").body, {})
        except (SyntaxError, ArithmeticError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{node.start_mark.name}: {text} is more than lists of numbers that can be computed; write them out, or"
                " give the config.yaml that the training wrote into its OUTPUT_DIR"
            ) from error

    yaml.SafeLoader.add_constructor(tag, compute)
    try:
        yield
    finally:
        del yaml.SafeLoader.yaml_constructors[tag]


def _computed(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return what an expression of numbers, lists of them and comprehensions comes to.

    Raises:
        KeyError, TypeError: It has anything else.
    """
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.List() | ast.Tuple():
            return [_computed(each, names) for each in node.elts]
        case ast.BinOp():
            left, right = _computed(node.left, names), _computed(node.right, names)
            if isinstance(left, list) or isinstance(right, list):
                raise TypeError("a list is no number")
            return ARITHMETIC[type(node.op)](left, right)
        case ast.ListComp(generators=[ast.comprehension(target=ast.Name(id=name), iter=listed, ifs=[])]):
            return [_computed(node.elt, {**names, name: each}) for each in _computed(listed, names)]
    raise TypeError(ast.unparse(node))


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> CfgNode:
    """Return Detectron2's defaults and ours, a config file over them, and overrides over that.

    Args:
        path: A YAML file of Detectron2, or the name of one that comes with the package; its METRICOPT node may be
            missing.
        overrides: ``[KEY, VALUE, KEY, VALUE, ...]``; in place of a pair, ``data.train=PATH``, ``data.val=PATH`` or
            ``data.test=PATH``, as in our other tools, for METRICOPT.DATASETS.TRAIN and its kin.

    Raises:
        ConfigError: The file can't be read, or a key or value in it is unknown, of another type or not obeyed here, or
            two overrides name the same part.
    """
    overrides = _in_pairs(overrides)
    cfg = get_cfg()
    add_metricopt_config(cfg)
    try:
        found = find_config(path)
        if found is not None:  # Detectron2 knows other places too
            check_yaml(found)
        with _lists_computed():
            cfg.merge_from_file(str(found or path), allow_unsafe=False)  # no Python objects in YAML
        cfg.merge_from_list(list(overrides))
    except MetricOptError:
        raise
    except (OSError, AssertionError, yaml.YAMLError, *MISFITS) as error:
        raise ConfigError(f"{path}: {error}{_nearest(str(error))}") from error
    if cfg.TEST.AUG.ENABLED:
        raise ConfigError("TEST.AUG.ENABLED: AP50 is evaluated without test-time augmentation here; set it to False")
    return cfg


def _in_pairs(overrides: Sequence[str]) -> list[str]:
    """Return overrides as keys and values, parts of one's own too."""
    pairs: list[str] = []
    left = list(overrides)
    while left:
        key = left.pop(0)
        if part := PART.fullmatch(str(key)):
            pairs += [f"METRICOPT.DATASETS.{part['name'].upper()}", repr(part["path"])]
        else:
            pairs += [key, *left[:1]]
            left = left[1:]
    for name, other in OF_PARTS.items():
        own = f"METRICOPT.DATASETS.{name.upper()}"
        if {own, other} <= set(pairs[::2]):
            raise ConfigError(f"{own} (data.{name}) and {other} both name the {name} part; leave one of them out")
    return pairs


def _nearest(said: str) -> str:
    """Return the keys nearest to the one that yacs says it does not know, or nothing if that is not what it says."""
    unknown = re.search(r"Non-existent (?:config )?key: ([\w.]+)", said)
    known = get_cfg()
    add_metricopt_config(known)
    return nearest(unknown[1], [*_leaves(known, "")]) if unknown else ""


def show_config(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Return all keys that `read_config` reads, Detectron2's too, as YAML that says where each value comes from.

    Raises:
        ConfigError: As from `read_config`.
    """
    overrides = _in_pairs(overrides)
    cfg = read_config(path, overrides)
    with _lists_computed():
        content = CfgNode.load_yaml_with_base(str(find_config(path) or path), allow_unsafe=False)
    origins = dict.fromkeys(_leaves(CfgNode(content), ""), FILE) | dict.fromkeys(overrides[::2], COMMAND_LINE)
    return "".join(f"{line}\n" for line in _lines(cfg, origins))


def _leaves(node: CfgNode, prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, CfgNode):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _lines(node: CfgNode, origins: Mapping[str, str], prefix: str = "", indent: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, CfgNode) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, origins, f"{key}.", f"{indent}  ")
        else:
            yield f"{indent}{name}: {in_yaml(_plain(value))}  # {origins.get(key, DEFAULT)}"


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
