"""The report card of a network under attack as tables on the terminal, and as a page of Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from dcnet.report.listing import Listing
from dcnet.robustness.checks import words_for

Card = Mapping[str, Any]
RESULTS = {True: "passed", False: "FAILED", None: "not made"}
NOTHING = "-"


def attacks(card: Card) -> Listing:
    """What each attack leaves."""
    columns = {
        "attack": lambda row: row["attack"],
        "how": lambda row: row["how"],
        "accuracy, %": lambda row: percent(row["accuracy"]),
    }
    title = f"attacks within {words_for(card['settings']['epsilon'])} of each pixel"
    return Listing(title, columns, attack_rows(card["results"]), ("accuracy, %",), ("how",))


def attack_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attacks in the order in which they are told, with None for the accuracy of those that were skipped."""
    return [
        {"attack": "none", "how": "the images as they are", "accuracy": results["clean"]["accuracy"]},
        _row("FGSM", "one step", results["fgsm"]),
        _row("BIM", "{steps} steps from the image", results["bim"]),
        _row("PGD", "{steps} steps, random starts: {restarts}", results["pgd"]),
        _row("PGD, smoothed", "{steps} steps by a gradient that does not saturate", results["smoothed_pgd"]),
        _row("Square", "{queries:,} questions, no gradient", results["square"]),
        *_transferred(results["transfer"]),
        _row("AutoAttack", "four attacks, one after the other", results["autoattack"]),
    ]


def _row(name: str, how: str, found: Mapping[str, Any]) -> dict[str, Any]:
    told = found.get("skipped") or how.format(**found)
    return {"attack": name, "how": told, "accuracy": found.get("accuracy")}


def _transferred(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "skipped" in found:
        return [_row("transfer", "", found)]
    how = f"made with {found.get('source', {}).get('run', 'another network')}"
    left = found["accuracies"].items()
    return [{"attack": f"{name.upper()}, transferred", "how": how, "accuracy": share} for name, share in left]


def checks(card: Card) -> Listing:
    """What speaks for and against the numbers."""
    columns = {
        "check": lambda row: row["claim"],
        "found": lambda row: row["words"],
        "": lambda row: RESULTS[row["passed"]],
    }
    return Listing("checks for masked gradients", columns, card["checks"], (), ("check", "found"))


def by_epsilon(card: Card) -> Listing:
    """The accuracy at each epsilon."""
    curve = card["results"]["by_epsilon"]
    rows = [
        {"epsilon": epsilon, "accuracy": left}
        for epsilon, left in zip(curve["epsilons"], curve["accuracies"], strict=True)
    ]
    columns = {
        "epsilon": lambda row: words_for(row["epsilon"]),
        "accuracy, %": lambda row: percent(row["accuracy"]),
    }
    return Listing(
        f"accuracy by epsilon, under PGD with {curve['steps']} steps", columns, rows, ("epsilon", "accuracy, %")
    )


def corruptions(card: Card) -> Listing:
    """The accuracy under each corruption, severity by severity."""
    found = card["results"]["corrupted"]["accuracies"]
    rows = [{"corruption": kind, **dict(enumerate(left, 1))} for kind, left in found.items()]
    count = len(next(iter(found.values())))
    columns: dict[str, Any] = {"corruption": lambda row: row["corruption"]}
    columns |= {f"severity {at}": lambda row, at=at: percent(row[at]) for at in range(1, count + 1)}
    return Listing("accuracy under corruptions, %", columns, rows, list(columns)[1:])


def page(card: Card, pictures: Sequence[str], command: str) -> str:
    """The whole report card in Markdown; `pictures` are the files of the curve and of the loss, as seen from it."""
    settings = card["settings"]
    curve, loss = pictures
    about = f"{card['network']}; {settings['images']:,} test images of {card['dataset']}, on {card['device']}"
    parts = [
        f"# Robustness of {card['run']}",
        f"{about}. Made by `{command}`.",
        "## Verdict",
        "\n".join(f"- {sentence}" for sentence in card["verdict"]["words"]),
        f"## Attacks within {words_for(settings['epsilon'])} of each pixel",
        table(attacks(card)),
        "## Checks for masked gradients",
        table(checks(card)),
        f"![Mean loss by how far images are moved along the gradient and in a random direction]({loss})",
        f"## {by_epsilon(card).title.capitalize().replace('pgd', 'PGD')}",
        table(by_epsilon(card)),
        f"![Accuracy by epsilon]({curve})",
        "## Corruptions, accuracy in %",
        table(corruptions(card)),
    ]
    return "\n\n".join(parts) + "\n"


def table(listing: Listing) -> str:
    """A listing in Markdown; words are aligned to the left, whatever their column."""
    rules = ["---:" if heading in listing.numbers else "---" for heading in listing.columns]
    rows = [[cell(row).replace("|", "\\|") for cell in listing.columns.values()] for row in listing.rows]
    lines = [[heading or "result" for heading in listing.columns], rules, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.2f}"
