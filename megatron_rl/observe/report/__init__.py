"""`megatron-rl report`: one self-contained HTML file about one or several runs."""
