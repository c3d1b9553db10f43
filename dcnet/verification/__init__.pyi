from dcnet.data.cifar import OpenSet, split_classes
from dcnet.data.decode import ImageFiles
from dcnet.data.image_folder import labels_of, people_folders
from dcnet.files import fingerprint
from dcnet.verification import measures as measures
from dcnet.verification import verify_run as verify_run
from dcnet.verification.embeddings import (
    HyperplaneSimilarity,
    Neighbors,
    ScoreHistogram,
    embed,
    nearest,
    normalized,
    pair_scores,
    score_histogram,
)
from dcnet.verification.identification import Identified, OpenSetRate, Retrieved, cmc, identify, open_set_rate, retrieve
from dcnet.verification.measures import evaluate_faces, evaluate_open_set, open_set_measures
from dcnet.verification.pairs import Disjoint, LfwData, Pairs, people_disjoint, read_pairs, sample_pairs
from dcnet.verification.roc_curve import (
    DevelopmentAccuracy,
    FoldAccuracy,
    Roc,
    TarAtFar,
    accuracy,
    best_threshold,
    check_rate,
    development_accuracy,
    fold_accuracy,
    make_folds,
    roc,
    roc_of_histogram,
)
from dcnet.verification.threshold import Calibration, Decision, Verdict, calibrate, calibrate_curve

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
    "Neighbors",
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
    "check_rate",
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
