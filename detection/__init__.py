"""Finetuning of object detectors, torchvision's or Detectron2's, for AP50."""
