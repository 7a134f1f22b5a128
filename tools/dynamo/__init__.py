"""Workers behind NVIDIA Dynamo, a program of their own."""
