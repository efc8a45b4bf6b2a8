"""MetricOpt under Detectron2, which is installed from source: https://github.com/facebookresearch/detectron2.

Only this package imports it.
"""
