"""Forward passes in NumPy, written from published formulas: oracles that share no code with the engine."""
