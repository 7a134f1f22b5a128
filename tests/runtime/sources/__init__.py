"""Sources: what encoders read, and the rows that texts behind them have."""
