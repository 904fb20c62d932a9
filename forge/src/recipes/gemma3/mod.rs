//! Gemma 3: decoders of text and of images, and encoders of text. Both have the same layers.

mod decoder;
mod encoder;
mod layers;
mod vision;

pub(super) use vision::TOWERS;
