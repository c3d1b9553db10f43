"""Are these two the same, and who is it? For people and classes that a network was never trained on."""

from dcnet.data.image_files import ImageFiles, labels_of, people_folders
from dcnet.data.open_set import OpenSet, split_classes
from dcnet.verification.calibration import Calibration, fingerprint
from dcnet.verification.curves import Roc, TarAtFar, roc, roc_of_histogram
from dcnet.verification.embeddings import embed, normalized
from dcnet.verification.faces import evaluate_faces
from dcnet.verification.hyperplane import HyperplaneSimilarity
from dcnet.verification.identification import Identified, OpenSetRate, cmc, identify, open_set_rate
from dcnet.verification.lfw import LfwData
from dcnet.verification.open_set import evaluate_open_set, open_set_measures
from dcnet.verification.pairs import Disjoint, Pairs, people_disjoint, read_pairs
from dcnet.verification.protocol import (
    DevelopmentAccuracy,
    FoldAccuracy,
    accuracy,
    best_threshold,
    development_accuracy,
    fold_accuracy,
    make_folds,
)
from dcnet.verification.retrieval import Retrieved, retrieve
from dcnet.verification.sampling import sample_pairs
from dcnet.verification.scores import Neighbours, ScoreHistogram, nearest, pair_scores, score_histogram
from dcnet.verification.threshold import Decision, Verdict, calibrate, calibrate_curve

__all__ = [
    "Calibration",
    "Decision",
    "DevelopmentAccuracy",
    "Disjoint",
    "FoldAccuracy",
    "HyperplaneSimilarity",
    "Identified",
    "ImageFiles",
    "LfwData",
    "Neighbours",
    "OpenSet",
    "OpenSetRate",
    "Pairs",
    "Retrieved",
    "Roc",
    "ScoreHistogram",
    "TarAtFar",
    "Verdict",
    "accuracy",
    "best_threshold",
    "calibrate",
    "calibrate_curve",
    "cmc",
    "development_accuracy",
    "embed",
    "evaluate_faces",
    "evaluate_open_set",
    "fingerprint",
    "fold_accuracy",
    "identify",
    "labels_of",
    "make_folds",
    "nearest",
    "normalized",
    "open_set_measures",
    "open_set_rate",
    "pair_scores",
    "people_disjoint",
    "people_folders",
    "read_pairs",
    "retrieve",
    "roc",
    "roc_of_histogram",
    "sample_pairs",
    "score_histogram",
    "split_classes",
]
