"""What a model's decisions on a whole data set are made of (`bcosvit audit`)."""
