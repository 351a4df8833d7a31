"""BibTeX entries of the papers whose mechanisms and networks this library implements."""

from collections.abc import Iterable

CITATIONS = {
    "mrla": """@inproceedings{fang2023crosslayer,
  title={Cross-Layer Retrospective Retrieving via Layer Attention},
  author={Fang, Yanwen and Cai, Yuxi and Chen, Jintai and Zhao, Jingyu and Tian, Guangjian and Li, Guodong},
  booktitle={International Conference on Learning Representations},
  year={2023},
  url={https://arxiv.org/abs/2302.03985}
}""",
    "rla": """@inproceedings{zhao2021recurrence,
  title={Recurrence along Depth: Deep Convolutional Neural Networks with Recurrent Layer Aggregation},
  author={Zhao, Jingyu and Fang, Yanwen and Li, Guodong},
  booktitle={Advances in Neural Information Processing Systems},
  year={2021},
  url={https://proceedings.neurips.cc/paper/2021/hash/582967e09f1b30ca2539968da0a174fa-Abstract.html}
}""",
    "halonet": """@inproceedings{vaswani2021scaling,
  title={Scaling Local Self-Attention for Parameter Efficient Visual Backbones},
  author={Vaswani, Ashish and Ramachandran, Prajit and Srinivas, Aravind and Parmar, Niki and Hechtman, Blake and
          Shlens, Jonathon},
  booktitle={IEEE/CVF Conference on Computer Vision and Pattern Recognition},
  year={2021},
  url={https://arxiv.org/abs/2103.12731}
}""",
    "cb": """@inproceedings{hyeonwoo2023scratching,
  title={Scratching Visual Transformer's Back with Uniform Attention},
  author={Hyeon-Woo, Nam and Yu-Ji, Kim and Heo, Byeongho and Han, Dongyoon and Oh, Seong Joon and Oh, Tae-Hyun},
  booktitle={IEEE/CVF International Conference on Computer Vision},
  year={2023},
  url={https://arxiv.org/abs/2210.08457}
}""",
    "rest": """@inproceedings{zhang2021rest,
  title={{ResT}: An Efficient Transformer for Visual Recognition},
  author={Zhang, Qinglong and Yang, Yu-Bin},
  booktitle={Advances in Neural Information Processing Systems},
  year={2021},
  url={https://arxiv.org/abs/2105.13677}
}""",
}
PAPER_OF_MECHANISM = {
    "mrla_light": "mrla", "mrla_base": "mrla", "mla": "mrla", "mrla_linear": "mrla", "crla": "mrla", "rla": "rla",
    "halo": "halonet", "cb": "cb",
}  # fmt: skip
NETWORKS_OF_PAPERS = {"halo_": "halonet", "rest_": "rest"}  # prefixes of the names of networks


def citations_of(backbone: str, mechanisms: Iterable[str]) -> list[str]:
    """Returns the BibTeX entries of the papers of a network and of the mechanisms attached to it."""
    papers = [paper for prefix, paper in NETWORKS_OF_PAPERS.items() if backbone.startswith(prefix)]
    papers += [PAPER_OF_MECHANISM[name] for name in mechanisms if name in PAPER_OF_MECHANISM]
    return [CITATIONS[paper] for paper in dict.fromkeys(papers)]
