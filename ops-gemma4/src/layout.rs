//! Layers of the decoder as the manifest declares them, checked against the graphs.

use qhx_kit::decoder::DecoderGraphs;
use qhx_kit::state::{SlidingLayers, StateCarrier};
use qhx_op::{Error, Host, Result};

/// The layers of a decoder.
#[derive(Debug)]
pub(crate) struct Layout {
    pub layers: usize,
    /// Layers from here on read the keys and values of a donor.
    first_shared: usize,
    /// `params.sliding` of the manifest, besides the rope.
    pub sliding: SlidingLayers,
}

impl Layout {
    /// Reads `params.n_layers`, `params.kv_shared_layers` and `params.sliding`.
    pub fn read(host: &Host) -> Result<Self> {
        let layers: usize = host.require("/params/n_layers")?;
        let shared: usize = host.require("/params/kv_shared_layers")?;
        let Some(first_shared) = layers.checked_sub(shared).filter(|own| *own > 0) else {
            return Err(Error::manifest(format!(
                "manifest /params/kv_shared_layers: {shared} of {layers} layers read the keys of another, expected \
                 fewer than /params/n_layers"
            )));
        };
        Ok(Self { layers, first_shared, sliding: host.require("/params/sliding")? })
    }

    fn slides(&self, layer: usize) -> bool {
        self.sliding.layers.contains(&layer)
    }

    /// Slots of the rings; none where no layer slides.
    pub fn ring(&self, state: &StateCarrier) -> Option<usize> {
        let own = (0..self.first_shared).find(|layer| self.slides(*layer))?;
        state.capacity_of(&format!("k_{own}"))
    }

    /// The last layer before those that share whose kind is that of `layer`.
    fn donor(&self, layer: usize) -> Option<usize> {
        (0..self.first_shared).rev().find(|donor| self.slides(*donor) == self.slides(layer))
    }

    /// Checks that each layer has a cache of its own, or else a donor with one and no cache.
    pub fn check(&self, host: &Host, graphs: &DecoderGraphs, state: &StateCarrier) -> Result<()> {
        let names = || {
            let decode = graphs.groups().first().map_or(&[][..], |graphs| *graphs);
            let names = decode.iter().map(|&graph| host.graph(graph).name.as_str());
            names.collect::<Vec<_>>().join(", ")
        };
        for layer in 0..self.layers {
            let own = ["k", "v"].map(|kind| format!("{kind}_{layer}"));
            if layer < self.first_shared {
                let Some(missing) = own.iter().find(|role| !state.has_cache(role)) else {
                    continue;
                };
                let readers: Vec<_> = (self.first_shared..self.layers)
                    .filter(|reader| self.donor(*reader) == Some(layer))
                    .map(|reader| reader.to_string())
                    .collect();
                let donor = match readers.as_slice() {
                    [] => String::new(),
                    readers => format!(", the donor of {}", readers.join(", ")),
                };
                return Err(Error::graph(format!(
                    "layer {layer}{donor}: the decode graphs ({}) have no past_{missing} with new_{missing}",
                    names()
                )));
            }
            if let Some(extra) = own.iter().find(|role| state.has_cache(role)) {
                return Err(Error::graph(format!(
                    "layer {layer} reads the keys and values of layer {}, but the decode graphs ({}) have past_{extra}; \
                     expected none for the last {} layers (manifest /params/kv_shared_layers)",
                    self.donor(layer).map_or_else(|| "?".to_owned(), |donor| donor.to_string()),
                    names(),
                    self.layers - self.first_shared
                )));
            }
        }
        Ok(())
    }
}
