"""scikit-learn: a classifier for tables that is tuned for a scorer, in a pipeline, by cross-validation."""

import argparse

import joblib
from sklearn.datasets import make_classification
from sklearn.metrics import f1_score
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer

from metricopt_ext.classification.estimator import MetricClassifier  # +

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--queries", type=int, default=60)  # +
args = parser.parse_args()
X, y = make_classification(
    2500, 20, n_informative=6, n_classes=4, weights=[0.75, 0.15, 0.06], class_sep=0.8, random_state=0
)
macro_f1 = {}
for queries in (0, args.queries):
    classifier = MetricClassifier("f1_macro", queries=queries, epochs=args.epochs, random_state=0)  # +
    pipeline = make_pipeline(PowerTransformer(), classifier)
    macro_f1[queries] = f1_score(y, cross_val_predict(pipeline, X, y, cv=3), average="macro")
    print(f"macro F1 by cross-validation, {queries} queries: {macro_f1[queries]:.4f}")
joblib.dump(pipeline.fit(X, y), "sklearn_table.joblib")
print(classifier.run_)
