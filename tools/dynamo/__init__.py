"""Workers of NVIDIA Dynamo, a program of their own."""
