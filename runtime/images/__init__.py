"""Images as vision graphs read them, made with Pillow and numpy as a checkpoint's own processor would."""
