from dcnet.data.cifar import OpenSet, split_classes
from dcnet.data.decode import ImageFiles
from dcnet.data.image_folder import labels_of, people_folders
from dcnet.files import fingerprint
from dcnet.verification import measures as measures
from dcnet.verification import pair_list as pair_list
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
from dcnet.verification.folds import FoldAccuracy, Folds, fold_accuracy, make_folds, people_folds
from dcnet.verification.identification import Identified, OpenSetRate, Retrieved, cmc, identify, open_set_rate, retrieve
from dcnet.verification.intervals import PeopleBootstrap, exact_interval
from dcnet.verification.measures import evaluate_faces, evaluate_open_set, open_set_measures
from dcnet.verification.pairs import (
    Disjoint,
    LfwData,
    Pairs,
    all_pairs,
    folder_pairs,
    people_disjoint,
    read_pairs,
    sample_pairs,
)
from dcnet.verification.quality import QualityScore, discard_errors, fit_quality, norms_of, pair_quality
from dcnet.verification.roc_curve import (
    DevelopmentAccuracy,
    Roc,
    TarAtFar,
    accuracy,
    best_threshold,
    check_rate,
    development_accuracy,
    roc,
    roc_of_histogram,
)
from dcnet.verification.threshold import (
    Calibration,
    Decision,
    Transfer,
    Verdict,
    calibrate,
    calibrate_curve,
    fold_transfer,
    transfer,
)

__all__ = [
    "Calibration",
    "Decision",
    "DevelopmentAccuracy",
    "Disjoint",
    "FoldAccuracy",
    "Folds",
    "HyperplaneSimilarity",
    "Identified",
    "ImageFiles",
    "LfwData",
    "Neighbors",
    "OpenSet",
    "OpenSetRate",
    "Pairs",
    "PeopleBootstrap",
    "QualityScore",
    "Retrieved",
    "Roc",
    "ScoreHistogram",
    "TarAtFar",
    "Transfer",
    "Verdict",
    "accuracy",
    "all_pairs",
    "best_threshold",
    "calibrate",
    "calibrate_curve",
    "check_rate",
    "cmc",
    "development_accuracy",
    "discard_errors",
    "embed",
    "evaluate_faces",
    "evaluate_open_set",
    "exact_interval",
    "fingerprint",
    "fit_quality",
    "fold_accuracy",
    "fold_transfer",
    "folder_pairs",
    "identify",
    "labels_of",
    "make_folds",
    "nearest",
    "normalized",
    "norms_of",
    "open_set_measures",
    "open_set_rate",
    "pair_quality",
    "pair_scores",
    "people_disjoint",
    "people_folders",
    "people_folds",
    "read_pairs",
    "retrieve",
    "roc",
    "roc_of_histogram",
    "sample_pairs",
    "score_histogram",
    "split_classes",
    "transfer",
]
