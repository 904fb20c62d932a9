//! Levels of red, green and blue to the numbers that a model takes.

use qhx_op::{Error, Result};

/// Normalised value of each of the 256 levels of a channel, in f32.
///
/// A table gives the bits of the reference's arithmetic, whatever that is, for the price of a look.
#[derive(Debug, Clone)]
pub struct Normalisation {
    levels: Box<[[f32; 256]; 3]>,
}

impl Normalisation {
    /// `level · scale`, without mean and standard deviation (`do_normalize` false). The usual scale
    /// is 1/255.
    ///
    /// # Errors
    /// When `scale` is not finite.
    pub fn rescale(scale: f64) -> Result<Self> {
        Self::of(|_, level| level * scale as f32)
    }

    /// `(level · scale − mean) / std` for each channel, as the processors of `transformers` that use
    /// torchvision compute it: `(level − mean / scale) / (std / scale)` in f32
    /// (`TorchvisionBackend.rescale_and_normalize`).
    ///
    /// # Errors
    /// When a number that comes out is not finite: a scale or standard deviation of 0.
    pub fn mean_std(mean: [f64; 3], std: [f64; 3], scale: f64) -> Result<Self> {
        let unscaled = |value: f64| value as f32 * (1.0 / scale) as f32;
        let (mean, std) = (mean.map(unscaled), std.map(unscaled));
        Self::of(|channel, level| (level - mean[channel]) / std[channel])
            .map_err(|e| e.context("image_mean, image_std and rescale_factor"))
    }

    /// The same with `change` applied to each number, such as `2 · (x − 0.5)` that a model class
    /// does itself.
    ///
    /// # Errors
    /// When a number that comes out is not finite.
    pub fn map(mut self, change: impl Fn(f32) -> f32) -> Result<Self> {
        self.levels.as_flattened_mut().iter_mut().for_each(|value| *value = change(*value));
        self.checked()
    }

    fn of(value: impl Fn(usize, f32) -> f32) -> Result<Self> {
        let mut levels = Box::new([[0.0; 256]; 3]);
        for (channel, levels) in levels.iter_mut().enumerate() {
            for (level, target) in levels.iter_mut().enumerate() {
                *target = value(channel, level as f32);
            }
        }
        Self { levels }.checked()
    }

    fn checked(self) -> Result<Self> {
        match self.levels.as_flattened().iter().find(|value| !value.is_finite()) {
            Some(value) => Err(Error::manifest(format!(
                "a level of an image becomes {value}, expected a finite number"
            ))),
            None => Ok(self),
        }
    }

    /// The number for a level of a channel: 0 is red, 1 green, 2 blue.
    ///
    /// # Panics
    /// When there is no such channel.
    pub fn value(&self, channel: usize, level: u8) -> f32 {
        self.levels[channel][usize::from(level)]
    }

    pub(super) fn channel(&self, channel: usize) -> &[f32; 256] {
        &self.levels[channel]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deviation_or_scale_of_zero_is_refused() {
        let half = [0.5; 3];
        for (std, scale) in [([0.5, 0.0, 0.5], 1.0 / 255.0), (half, 0.0), (half, f64::NAN)] {
            let error = Normalisation::mean_std(half, std, scale).unwrap_err();
            assert!(error.message().contains("image_std"), "{error}");
        }
        assert!(Normalisation::rescale(f64::INFINITY).is_err());
        let plain = Normalisation::rescale(1.0).unwrap();
        assert!(plain.map(|x| 1.0 / x).is_err());
    }
}
