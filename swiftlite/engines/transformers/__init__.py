"""The engine "transformers", with MTP heads in plain torch. It is always installed."""
