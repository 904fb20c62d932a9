//! Layers with sliding attention, as a manifest declares them.

use serde::Deserialize;

use super::StateCarrier;

/// Sliding layers of a decoder: those whose caches are rings.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct SlidingLayers {
    /// Indices of these layers.
    pub layers: Vec<usize>,
    /// Positions that they see, the current one included.
    pub window: usize,
}

impl SlidingLayers {
    /// Window of the cache `k_i` or `v_i`, if layer i slides: for [`StateCarrier::with_rings`].
    pub fn window_of(&self, role: &str) -> Option<usize> {
        let (_, layer) = role.rsplit_once('_')?;
        let layer: usize = layer.parse().ok()?;
        self.layers.contains(&layer).then_some(self.window)
    }

    /// Slots of the rings; `None` if no layer slides.
    pub fn slots(&self, state: &StateCarrier) -> Option<usize> {
        self.layers.first().and_then(|layer| state.capacity_of(&format!("k_{layer}")))
    }
}
