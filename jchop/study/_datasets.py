"""The data sets: real measurements from scikit-learn, split and standardised."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from sklearn import datasets

#: Share of the samples kept for testing.
TEST_SHARE = 0.3


class Dataset(NamedTuple):
    """Standardised inputs as float32, labels as int32."""

    train_x: np.ndarray  # (samples, 8, 8, 1) images or (samples, features)
    train_y: np.ndarray  # (samples,)
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int


_DATASET_LOADERS = {
    "digits": datasets.load_digits,  # 1,797 images of 8 x 8 pixels (UCI optdigits)
    "breast-cancer": datasets.load_breast_cancer,  # 569 samples, 30 features (UCI WDBC)
    "wine": datasets.load_wine,  # 178 samples, 13 features (UCI wine)
}


def load_dataset(dataset: str, seed: int) -> Dataset:
    """A data set, split by a permutation from `seed` and standardised by mean and deviation of the training part.

    Images share one mean and deviation, so that pixels remain comparable; other features have one each.
    """
    bunch = _DATASET_LOADERS[dataset]()
    x, y = np.asarray(bunch.data, np.float64), np.asarray(bunch.target, np.int32)  # type: ignore[union-attr]
    order = np.random.default_rng(seed).permutation(len(x))
    count = round(TEST_SHARE * len(x))
    test, train = order[:count], order[count:]
    images = dataset == "digits"
    axis = None if images else 0
    deviation = x[train].std(axis=axis)
    x = (x - x[train].mean(axis=axis)) / np.where(deviation > 0, deviation, 1.0)
    x = (x.reshape(-1, 8, 8, 1) if images else x).astype(np.float32)
    return Dataset(x[train], y[train], x[test], y[test], int(y.max()) + 1)
