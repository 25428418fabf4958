"""What only a GPU needs: linear layers, decode graphs, layers in host memory."""
