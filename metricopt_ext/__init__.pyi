"""The public names and where each is from: `__init__.py` imports them from there at their first use."""

from . import errors as errors
from .adapters.adapter import Adapter as Adapter
from .adapters.attach import attach_film as attach_film
from .adapters.attach import attach_mixture as attach_mixture
from .adapters.attach import attach_outputs as attach_outputs
from .adapters.attach import load_adapter as load_adapter
from .adapters.signature import Outputs as Outputs
from .adapters.start import Start as Start
from .adapters.start import StartLine as StartLine
from .methods.ask_and_tell import Search as Search
from .methods.assess import assess as assess
from .methods.folder import load_run as load_run
from .methods.pipeline import optimize_metric as optimize_metric
from .methods.result import Result as Result
from .methods.soups import soup_starts as soup_starts
from .methods.starts import batchnorm_start as batchnorm_start
from .runtime.progress import Callback as Callback
from .search.optimizer import MetricOpt as MetricOpt
from .tasks.batches import DatasetBatches as DatasetBatches
from .tasks.batches import TensorBatches as TensorBatches
from .tasks.inference_file import load_inference as load_inference
from .tasks.metric import Metric as Metric
from .tasks.settings import Setting as Setting
from .tasks.settings import Settings as Settings
from .tasks.task import FinetuneTask as FinetuneTask
from .value.loading import load_value_function as load_value_function
