"""How to read the figures: a title, a few sentences and the figure of a paper for each, on pages and in the gallery."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """How to read a figure.

    Args:
        title: what it shows.
        text: how to read it.
        origin: the figure of a paper that it corresponds to; empty if there is none.
    """

    title: str
    text: str
    origin: str = ""


READINGS = {
    "class_activation": Reading(
        "Where a class is seen",
        "Warm colors mark what speaks for the class below the picture. A network that has learned the class marks "
        "the object; marks on the background mean that it decides by the surroundings.",
        "MRLA, Figure 6; ResT, Figure 2",
    ),
    "layer_scores": Reading(
        "Which layer reads which",
        "A row is a layer, a column a layer that it reads, and the color the weight of that layer in its output, "
        "averaged over images, heads and channels. In MRLA-base the weights of a row add up to one; in MRLA-light "
        "they are products of lambda and have both signs, so a cell can be divided: positive weights at its upper "
        "left, negative ones at its lower right.",
        "MRLA, Figure 1a and Eq. 8",
    ),
    "contribution": Reading(
        "What the mechanism contributes",
        "A bar is the change of a block's output if the mechanism is switched off in that block alone, relative to "
        "its size. Where it is near zero, what the mechanism computes does not matter there.",
    ),
    "queries": Reading(
        "Are the queries of consecutive layers alike?",
        "MRLA-light assumes that the query of a layer is proportional to that of the layer before: the absolute "
        "cosine similarity would then be one. The dashed line is the mean of random directions.",
        "MRLA, Figure 2b",
    ),
    "sharing": Reading(
        "Which layers could share their scores",
        "A bar is the KL divergence between the scores of a layer and of the layer before, over the layers that "
        "both read. Near zero, a layer could use the scores of the layer before instead of computing its own.",
    ),
    "attention": Reading(
        "What a patch attends to",
        "The red box is the query. Colors are the weights of the patches that it attends to, one picture for each "
        "head of the last attention: a few bright patches are sparse attention, an even color is dense attention.",
        "MRLA, Figure 7; CB, Figure 10",
    ),
    "entropy": Reading(
        "How dense attention is",
        "The higher the entropy of a row of the attention, the more evenly it is spread over the keys; the dotted "
        "line is uniform attention. The band is from the 15th to the 85th percentile of the rows.",
        "CB, Figures 4 and 7a",
    ),
    "distance": Reading(
        "How far attention reaches",
        "The weight of attention times the distance of two tokens in fractions of the image's sides, as the mean over "
        "all pairs: the higher, the farther a layer attends, but the more tokens, the lower. Points are heads. The "
        "dashed line is uniform attention.",
        "CB, Figure 7b",
    ),
    "jacobian": Reading(
        "How strongly scores are pulled",
        "The nuclear norm of the softmax's Jacobian against the entropy of each row. It is largest for uniform "
        "attention, which a single step of training can therefore break most easily.",
        "CB, Figure 5",
    ),
    "broadcast_scales": Reading(
        "How much of the average token is added",
        "The scales of context broadcasting by depth: a ratio near one means that all channels add about as much of "
        "the average token, and the mean how much.",
        "CB, Figure 8",
    ),
    "emsa_heads": Reading(
        "How similar the heads of EMSA are",
        "Cosine similarity of the attention maps of two heads: before the heads are mixed, after it, and after "
        "softmax and instance norm, which according to the paper makes them diverse again.",
        "ResT, Figure 1",
    ),
}
