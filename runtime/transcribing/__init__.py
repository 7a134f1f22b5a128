"""Writing down what is heard, however long it is: Whisper's tokens, its windows, and the pieces that they give."""
