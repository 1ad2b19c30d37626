"""Train a draft model: `accelerate launch train/draft_model.py [--config F] [key.sub=value ..]`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from train.trainer import main

    main("draft_model")
