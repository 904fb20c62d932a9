//! Makes bundles: checkpoint to graphs, context binaries, ONNX and manifest
