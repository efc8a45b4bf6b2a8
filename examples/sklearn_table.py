"""scikit-learn: a classifier for tables that is tuned for a scorer, in a pipeline, by cross-validation."""

import argparse

import joblib
from sklearn.datasets import make_classification
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer

from metricopt_ext.classification.estimator import MetricClassifier  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=30)
args = parser.parse_args()
X, y = make_classification(
    2500, 20, n_informative=6, n_classes=4, weights=[0.75, 0.15, 0.06], class_sep=0.8, random_state=0
)
classifier = MetricClassifier("f1_macro", queries=60, epochs=args.epochs, random_state=0)  # +
pipeline = make_pipeline(PowerTransformer(), classifier)
scores = cross_validate(pipeline, X, y, scoring="f1_macro", cv=3)["test_score"]
untuned = cross_validate(pipeline.set_params(metricclassifier__queries=0), X, y, scoring="f1_macro", cv=3)["test_score"]
print(f"macro F1 by cross-validation: {scores.mean():.4f}, without the search {untuned.mean():.4f}")
pipeline.set_params(metricclassifier__queries=60).fit(X, y)
print(classifier.run_)
joblib.dump(pipeline, "sklearn_table.joblib")
