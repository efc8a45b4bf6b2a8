"""Every host under one contract: a plain loop, scikit-learn, Lightning, Hugging Face, pytorch-metric-learning."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import metricopt_ext as mo
from metricopt_ext.classification.estimator import MetricClassifier
from testers.host import Host, HostTester, Judge

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0.5).long()
DATA, TRAINED_ON = TensorDataset(X, Y), TensorDataset(X + 0.01, Y)
QUIET: dict[str, Any] = {"callback": mo.Callback(), "attach": partial(mo.attach_film, dim=4, outputs=mo.Outputs())}


def network() -> nn.Sequential:
    """A network in the modes that a script may have left it in, part of it frozen."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 2))
    made[0].requires_grad_(False)
    made[3].eval()
    return made


def right(probabilities: Tensor, y: Tensor) -> float:
    """The mean probability of the right class, whose best value no rounding decides."""
    return float(probabilities.detach().double().gather(1, y[:, None]).mean())


class TestLoop(HostTester):
    def host(self, folder: Path, judge: Judge) -> Host:
        model = network()

        def score(x: Tensor, y: Tensor) -> float:
            return right(F.dropout(model(x), training=False).softmax(1), y)

        def metric() -> tuple[float, list[float]]:
            judge.ask()
            halves = [judge.says(score(X[half::2], Y[half::2]), half=True) for half in (0, 1)]
            return judge.says(score(X, Y)), halves

        def loaded() -> list[nn.Module]:
            torch.save(model.state_dict(), folder / "model.pt")
            other = network()
            other.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
            return [other]

        loader = DataLoader(TRAINED_ON, batch_size=16, shuffle=True)
        given = {"loss": nn.CrossEntropyLoss(), "batches": loader, "metric": mo.Metric(metric, maximize=True)}
        tune = partial(mo.tune_model, model, queries=self.queries, **given, **QUIET)
        return Host(tune, lambda: model, lambda: score(X, Y), loaded, lambda each: each(X).detach())


class TestMetricClassifier(HostTester):
    test_a_killed_run_goes_on_to_the_same_end = None  # an estimator has no folder

    def host(self, folder: Path, judge: Judge) -> Host:
        held: list[Any] = []  # the rows of the scorer, which `fit` draws

        def score(classifier: Any, x: Any, y: Any) -> float:
            return right(torch.from_numpy(classifier.predict_proba(x)), torch.as_tensor(y))

        def scorer(classifier: Any, x: Any, y: Any) -> float:
            if not held:
                held.extend((x, y))
                raise RuntimeError("these are the rows")
            half = len(y) < len(held[1])
            if not half:
                judge.ask()
            return judge.says(score(classifier, x, y), half=half)

        x, y = X.double().numpy().repeat(3, 0), Y.numpy().repeat(3)
        made = MetricClassifier(scorer, dim=2, hidden=(8,), epochs=2, lr=0.05, random_state=0, queries=self.queries)
        with pytest.raises(mo.errors.MetricError, match="these are the rows"):
            made.fit(x, y)
        made.set_params(queries=0).fit(x, y)

        def tune() -> mo.Result:
            return made.set_params(queries=self.queries).fit(x, y).run_

        return Host(
            tune,
            lambda: made.model_,
            lambda: score(made, *held),
            lambda: [pickle.loads(pickle.dumps(made.set_params(scoring=None))).model_],
            lambda each: each(torch.from_numpy(x)).detach(),
        )


class TestLightning(HostTester):
    @pytest.fixture(autouse=True)
    def _ignored(self, recwarn: pytest.WarningsRecorder) -> None:
        pytest.importorskip("lightning", reason="the extra `examples` is not installed")

    def host(self, folder: Path, judge: Judge) -> Host:
        import lightning as L
        from lightning.pytorch.callbacks import ModelCheckpoint

        from metricopt_ext.integrations.lightning import SearchPhi

        class Module(L.LightningModule):
            """Takes no steps, so that its weights are those that it begins with."""

            def __init__(self) -> None:
                super().__init__()
                self.net, self.trained = network(), False

            def on_fit_start(self) -> None:
                self.trained = False

            def on_train_end(self) -> None:
                self.trained = True

            def training_step(self, batch: Any, index: int) -> Tensor:
                return F.cross_entropy(self.net(batch[0]), batch[1])

            def validation_step(self, batch: Any, index: int) -> None:
                if self.trained:  # no epoch's own validation
                    judge.ask()
                scores = self.net(batch[0]).softmax(1)
                parts = {"even": slice(0, None, 2), "odd": slice(1, None, 2)}
                halves = {name: judge.says(right(scores[of], batch[1][of]), half=True) for name, of in parts.items()}
                self.log_dict({"score": judge.says(right(scores, batch[1])), **halves})

            def configure_optimizers(self) -> None: ...

        def trainer(**options: Any) -> Any:
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            return L.Trainer(accelerator="cpu", max_epochs=1, **quiet, **options)

        module, whole = Module(), DataLoader(DATA, batch_size=48)
        hosts = [trainer(enable_checkpointing=False)]
        hosts[0].fit(module, DataLoader(TRAINED_ON, batch_size=16), whole)

        def tune(**options: Any) -> mo.Result:
            search = SearchPhi("score", halves=("even", "odd"), queries=self.queries, **QUIET, **options)
            kept = ModelCheckpoint(folder / str(len(hosts)), save_last=True)
            hosts.append(trainer(callbacks=[search, kept], num_sanity_val_steps=0))
            hosts[-1].fit(module, DataLoader(TRAINED_ON, batch_size=16), whole)
            return search.run

        def evaluate() -> float:
            return float(trainer().validate(module, whole, verbose=False)[0]["score"])

        def loaded() -> list[nn.Module]:
            hosts[-1].save_checkpoint(folder / "tuned.ckpt")
            return [Module.load_from_checkpoint(folder / "tuned.ckpt")]

        return Host(tune, lambda: module, evaluate, loaded, lambda each: each.net.eval()(X).detach())


ROWS = [{"input_ids": [int(10 * y + i % 7), 20 + i % 5, 30 + i % 3], "labels": int(y)} for i, y in enumerate(Y)]


class TestHuggingFace(HostTester):
    def host(self, folder: Path, judge: Judge) -> Host:
        transformers = pytest.importorskip("transformers", reason="the extra `examples` is not installed")
        from metricopt_ext.integrations.huggingface import tune_trainer

        class Trainer(transformers.Trainer):
            def evaluate(self, *arguments: Any, **options: Any) -> Any:
                judge.ask()
                return super().evaluate(*arguments, **options)

        def compute(prediction: Any) -> dict[str, float]:
            found = right(torch.from_numpy(prediction.predictions).softmax(1), torch.from_numpy(prediction.label_ids))
            return {"likelihood": judge.says(found, half=len(prediction.label_ids) < len(ROWS))}

        torch.manual_seed(0)
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        trainer = Trainer(
            transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=40, **small)),
            transformers.TrainingArguments(
                str(folder),
                max_steps=2,
                save_steps=1,
                eval_strategy="steps",
                eval_steps=1,
                load_best_model_at_end=True,
                metric_for_best_model="likelihood",
                learning_rate=0.0,  # so the first checkpoint is the best, and the last another
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                per_device_eval_batch_size=48,
            ),
            train_dataset=[{**row, "input_ids": [*row["input_ids"], 39]} for row in ROWS],
            eval_dataset=ROWS,
            compute_metrics=compute,
        )
        most, judge.most = judge.most, float("inf")
        trainer.train()
        judge.most = most

        def loaded() -> list[nn.Module]:
            trainer.save_model()
            return [transformers.AutoModelForSequenceClassification.from_pretrained(folder)]

        def outputs(model: nn.Module) -> Tensor:
            ids = torch.tensor([row["input_ids"] for row in ROWS])
            return model.eval()(input_ids=ids).logits.detach()

        return Host(
            partial(tune_trainer, trainer, queries=self.queries, **QUIET),
            lambda: trainer.model,
            lambda: float(trainer.evaluate()["eval_likelihood"]),
            loaded,
            outputs,
        )


class TestMetricLearning(HostTester):
    def host(self, folder: Path, judge: Judge) -> Host:
        pytest.importorskip("faiss")
        pytest.importorskip("pytorch_metric_learning")
        from pytorch_metric_learning import losses, testers, trainers
        from pytorch_metric_learning.utils import common_functions
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

        from metricopt_ext.retrieval.search import tune_with_trainer

        # Eight classes, told apart by four coordinates; the others are louder than they were in training.
        rng, labels = torch.Generator().manual_seed(1), torch.arange(96) % 8
        told = 3 * torch.randn(8, 4, generator=rng)[labels] + torch.randn(96, 4, generator=rng)
        points = torch.cat([told, 4 * torch.randn(96, 4, generator=rng)], 1)

        def untuned() -> nn.Sequential:
            made = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
            made(points)  # moves the running statistics
            return made

        class Calculator(AccuracyCalculator):  # type: ignore[misc]
            def calculate_mean_average_precision_at_r(self, knn_labels: Any, query_labels: Any, **known: Any) -> float:
                half = len(query_labels) < len(labels)
                if not half:
                    judge.ask()
                value = super().calculate_mean_average_precision_at_r(knn_labels, query_labels, **known)
                return judge.says(float(value), half=half)

        score, cpu = "mean_average_precision_at_r", torch.device("cpu")
        calculator = Calculator(include=(score,), k="max_bin_count", device=cpu)
        tester = testers.GlobalEmbeddingSpaceTester(
            accuracy_calculator=calculator, dataloader_num_workers=0, data_device=cpu
        )
        trunk, embedder = untuned(), nn.Identity()
        trainer = trainers.MetricLossOnly(
            models={"trunk": trunk, "embedder": embedder},
            optimizers={"trunk_optimizer": torch.optim.Adam(trunk.parameters())},
            batch_size=16,
            loss_funcs={"metric_loss": losses.TripletMarginLoss()},
            dataset=TensorDataset(points + 0.01, labels),
            dataloader_num_workers=0,
            data_device=cpu,
        )
        sets = {"val": TensorDataset(points, labels)}

        def evaluate() -> float:
            return float(tester.test(sets, 0, trunk, embedder)["val"][f"{score}_level0"])

        def loaded() -> list[nn.Module]:
            common_functions.save_model(trunk, folder / "trunk.pth")
            other = untuned()
            common_functions.load_model(other, folder / "trunk.pth", cpu)
            return [other]

        attach = partial(mo.attach_film, dim=4)
        tune = partial(tune_with_trainer, trainer, tester, sets, queries=self.queries, metric=score)
        return Host(
            partial(tune, attach=attach, callback=mo.Callback()),
            lambda: trunk,
            evaluate,
            loaded,
            lambda each: each.eval()(points).detach(),
        )
