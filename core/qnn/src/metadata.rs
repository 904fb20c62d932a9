//! Copies what the system library reports about a context binary, with every number and text checked.
//!
//! A damaged or hostile file passes through the library as it is: counts that no model has, names
//! that are missing or never end. All that is read here has a limit, so that neither memory nor
//! output grows beyond what a model could need, and the first thing that makes no sense ends it.
//! Pointers themselves cannot be checked; that is why [`super::probe`] reads in a child.

#![expect(unsafe_code, reason = "reads structures of the system library")]

use std::ffi::{c_char, c_void};
use std::fmt;

use qhx_qnn_sys::{self as sys, ContextBlob, GraphBlob, QuantizeParams, ScaleOffset, Tensor};
use qhx_types::Quantization;

use super::info::{BinaryGraph, BinaryInfo, BinaryTensor, GraphFigures};
use super::types;

/// Graphs of a context. The largest published bundles have a few dozen.
const MAX_GRAPHS: u32 = 1024;
/// Inputs and outputs of all graphs. Each layer of a decoder has some four in each graph.
const MAX_TENSORS: u32 = 1 << 14;
/// Dimensions of a tensor; the library itself knows five or six.
const MAX_RANK: u32 = 16;
/// Bytes of a name.
const MAX_NAME: usize = 1024;
/// Bytes of all names.
const MAX_NAMES: usize = 4 << 20;
/// Scales of all inputs and outputs that are quantised by channel.
const MAX_SCALES: u32 = 1 << 20;

/// Why a description is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Its version is unknown.
    Version(u32),
    /// Its declarations make no sense.
    Content(String),
}

type Checked<T> = Result<T, String>;

/// # Safety
/// `info` leads to a description that the system library made and still owns.
pub(crate) unsafe fn copy(
    info: *const sys::BinaryInfo,
    file_bytes: u64,
) -> Result<BinaryInfo, Fault> {
    let mut reader = Reader { tensors: 0, names: 0, scales: 0 };
    // SAFETY: the caller vouches for the description; the version determines which member of the union
    // is set. Version 1 ends before `platform`, which is not read.
    unsafe {
        // Reads either body: fields of one name mean the same in both.
        macro_rules! of_body {
            ($body:expr, $dsp_arch:expr, $soc_model:expr) => {{
                let graphs = reader.graphs($body.graphs, $body.graph_count);
                Ok(BinaryInfo {
                    file_bytes,
                    backend_id: $body.backend_id,
                    build_id: reader.build_id($body.build_id).map_err(Fault::Content)?,
                    core_version: $body.core.into(),
                    backend_version: $body.backend.into(),
                    blob_version: $body.blob_version.into(),
                    blob_bytes: $body.blob_size,
                    dsp_arch: $dsp_arch,
                    soc_model: $soc_model,
                    graphs: graphs.map_err(Fault::Content)?,
                })
            }};
        }
        let body = &(*info).body;
        match (*info).version {
            1 | 2 => of_body!(body.v1, None, None),
            3 => {
                let metadata = body.v3.metadata.cast::<ContextBlob>();
                let fits = body.v3.metadata_size as usize >= size_of::<ContextBlob>();
                let dsp_arch =
                    (fits && !metadata.is_null()).then(|| metadata.read_unaligned().dsp_arch);
                of_body!(body.v3, dsp_arch, Some(body.v3.soc_model))
            }
            version => Err(Fault::Version(version)),
        }
    }
}

/// Counts of what was read so far, against the limits for the whole file.
struct Reader {
    tensors: u32,
    names: usize,
    scales: u32,
}

impl Reader {
    /// # Safety
    /// `graphs` leads to `count` descriptions.
    unsafe fn graphs(
        &mut self,
        graphs: *const sys::GraphInfo,
        count: u32,
    ) -> Checked<Vec<BinaryGraph>> {
        if count > MAX_GRAPHS {
            return Err(format!("{count} graphs, expected at most {MAX_GRAPHS}"));
        }
        list(graphs, count, "the list of graphs")?;
        let mut copied = Vec::new();
        for index in 0..count as usize {
            // SAFETY: the index is below the count; versions before 3 end before `blob_size`,
            // which is read for version 3 only.
            let graph = unsafe { &*graphs.add(index) };
            let at = format_args!("graph {index} of {count}");
            if !(1..=3).contains(&graph.version) {
                return Err(format!("{at}: version {}, expected 1 to 3", graph.version));
            }
            // SAFETY: contract: lists, texts.
            copied.push(unsafe {
                BinaryGraph {
                    name: self.name(graph.name, &at)?,
                    inputs: self.side(graph.inputs, graph.input_count, &at, "input")?,
                    outputs: self.side(graph.outputs, graph.output_count, &at, "output")?,
                    figures: if graph.version == 3 {
                        copy_figures(graph.blob, graph.blob_size)
                    } else {
                        None
                    },
                }
            });
        }
        Ok(copied)
    }

    /// # Safety
    /// `tensors` leads to `count` tensors.
    unsafe fn side(
        &mut self,
        tensors: *const Tensor,
        count: u32,
        graph: &dyn fmt::Display,
        side: &str,
    ) -> Checked<Vec<BinaryTensor>> {
        self.tensors = self.tensors.saturating_add(count);
        if self.tensors > MAX_TENSORS {
            return Err(format!(
                "{graph}: {count} {side}s, expected at most {MAX_TENSORS} tensors in all graphs"
            ));
        }
        list(tensors, count, format_args!("{graph}: the list of {side}s"))?;
        let mut copied = Vec::new();
        for index in 0..count as usize {
            // SAFETY: the index is below the count. Both versions have the fields that are read at
            // the same places; those of version 2 alone are not read.
            let tensor = unsafe { tensors.add(index) };
            let at = format_args!("{graph}: {side} {index} of {count}");
            // SAFETY: contract: lists.
            copied.push(unsafe { self.tensor(tensor, &at)? });
        }
        Ok(copied)
    }

    /// # Safety
    /// `tensor` leads to a tensor of version 1 or longer.
    unsafe fn tensor(
        &mut self,
        tensor: *const Tensor,
        at: &dyn fmt::Display,
    ) -> Checked<BinaryTensor> {
        // SAFETY: the caller vouches for the tensor, which has these fields in every version.
        let (version, id, name, code, format, rank, dimensions, quantize) = unsafe {
            (
                (*tensor).version,
                (*tensor).id,
                (*tensor).name,
                (*tensor).data_type,
                (*tensor).data_format,
                (*tensor).rank,
                (*tensor).dimensions,
                (*tensor).quantize,
            )
        };
        if !(1..=2).contains(&version) {
            return Err(format!("{at}: version {version}, expected 1 or 2"));
        }
        if rank > MAX_RANK {
            return Err(format!("{at}: {rank} dimensions, expected at most {MAX_RANK}"));
        }
        list(dimensions, rank, format_args!("{at}: the list of dimensions"))?;
        // SAFETY: contract: lists.
        let shape: Vec<usize> =
            (0..rank as usize).map(|d| unsafe { dimensions.add(d).read() } as usize).collect();
        // SAFETY: contract: texts, lists.
        let (name, quantization) =
            unsafe { (self.name(name, at)?, self.quantization(&quantize, at)?) };
        let dtype = types::dtype(code);
        Ok(BinaryTensor { id, name, dtype, dtype_code: code, format, shape, quantization })
    }

    /// # Safety
    /// The pointer is NULL or leads to a C string.
    unsafe fn name(&mut self, pointer: *const c_char, at: &dyn fmt::Display) -> Checked<String> {
        // SAFETY: handed on.
        let name = unsafe { bounded(pointer) }.map_err(|e| format!("{at}: the name {e}"))?;
        if name.is_empty() {
            return Err(format!("{at}: the name is empty"));
        }
        self.names += name.len();
        if self.names > MAX_NAMES {
            return Err(format!("{at}: the names take more than {} MiB", MAX_NAMES >> 20));
        }
        Ok(name)
    }

    /// # Safety
    /// The pointer is NULL or leads to a C string.
    unsafe fn build_id(&self, pointer: *const c_char) -> Checked<String> {
        if pointer.is_null() {
            return Ok(String::new());
        }
        // SAFETY: handed on.
        unsafe { bounded(pointer) }.map_err(|e| format!("the build id {e}"))
    }

    /// # Safety
    /// The parameters are the library's, so that their encoding determines which member of the union is
    /// set.
    unsafe fn quantization(
        &mut self,
        params: &QuantizeParams,
        at: &dyn fmt::Display,
    ) -> Checked<Quantization> {
        if params.definition != sys::QUANT_DEFINED {
            return Ok(Quantization::None);
        }
        // SAFETY: contract: lists; the caller vouches for the encoding.
        unsafe {
            Ok(match params.encoding {
                sys::ENCODING_SCALE_OFFSET => {
                    let ScaleOffset { scale, offset } = params.value.scale_offset;
                    Quantization::PerTensor { scale: finite(scale, at)?, offset }
                }
                sys::ENCODING_BW_SCALE_OFFSET => {
                    let value = params.value.bw;
                    if value.bitwidth == 8 || value.bitwidth == 16 || value.bitwidth == 32 {
                        let scale = finite(value.scale, at)?;
                        Quantization::PerTensor { scale, offset: value.offset }
                    } else {
                        Quantization::Other { code: params.encoding }
                    }
                }
                sys::ENCODING_AXIS_SCALE_OFFSET => {
                    let value = params.value.axis;
                    let values = self.scales(value.values, value.count, at)?;
                    Quantization::PerAxis {
                        axis: usize::try_from(value.axis).unwrap_or(0),
                        scales: finite_all(values.iter().map(|v| v.scale), at)?,
                        offsets: values.iter().map(|v| v.offset).collect(),
                    }
                }
                sys::ENCODING_BW_AXIS_SCALE_OFFSET if params.value.bw_axis.bitwidth == 8 => {
                    let value = params.value.bw_axis;
                    let scales = self.scales(value.scales, value.count, at)?;
                    let scales = finite_all(scales.iter().copied(), at)?;
                    // All zero where there are none.
                    let offsets = if value.offsets.is_null() {
                        Vec::new()
                    } else {
                        self.scales(value.offsets, value.count, at)?.to_vec()
                    };
                    Quantization::PerAxis {
                        axis: usize::try_from(value.axis).unwrap_or(0),
                        scales,
                        offsets,
                    }
                }
                sys::UNDEFINED => Quantization::None,
                code => Quantization::Other { code },
            })
        }
    }

    /// # Safety
    /// `pointer` leads to `count` elements that outlive the use of the slice.
    unsafe fn scales<'a, T>(
        &mut self,
        pointer: *const T,
        count: u32,
        at: &dyn fmt::Display,
    ) -> Checked<&'a [T]> {
        self.scales = self.scales.saturating_add(count);
        if self.scales > MAX_SCALES {
            return Err(format!("{at}: {count} scales, expected at most {MAX_SCALES} in all"));
        }
        list(pointer, count, format_args!("{at}: the list of scales"))?;
        if count == 0 {
            return Ok(&[]);
        }
        // SAFETY: the caller vouches for the list, which is neither NULL nor misaligned.
        Ok(unsafe { std::slice::from_raw_parts(pointer, count as usize) })
    }
}

/// A scale that numbers can be multiplied by; JSON has no others either.
fn finite(scale: f32, at: &dyn fmt::Display) -> Checked<f32> {
    if scale.is_finite() {
        return Ok(scale);
    }
    Err(format!("{at}: a scale is {scale}, expected a finite number"))
}

fn finite_all(scales: impl Iterator<Item = f32>, at: &dyn fmt::Display) -> Checked<Vec<f32>> {
    scales.map(|scale| finite(scale, at)).collect()
}

/// A list that has elements is there, and aligned.
fn list<T>(pointer: *const T, count: u32, what: impl fmt::Display) -> Checked<()> {
    if count == 0 || (!pointer.is_null() && pointer.is_aligned()) {
        return Ok(());
    }
    let fault = if pointer.is_null() { "missing" } else { "misaligned" };
    Err(format!("{what} is {fault}, expected {count} entries"))
}

/// A C string of bounded length.
///
/// # Safety
/// The pointer is NULL or leads to a C string, or to more than [`MAX_NAME`] bytes.
unsafe fn bounded(pointer: *const c_char) -> Checked<String> {
    if pointer.is_null() {
        return Err("is missing".to_owned());
    }
    let mut bytes = Vec::new();
    loop {
        // SAFETY: no byte before this one was the end.
        let byte = unsafe { pointer.cast::<u8>().add(bytes.len()).read() };
        if byte == 0 {
            return String::from_utf8(bytes).map_err(|_| "is not UTF-8".to_owned());
        }
        if bytes.len() == MAX_NAME {
            return Err(format!("is longer than {MAX_NAME} bytes"));
        }
        bytes.push(byte);
    }
}

/// # Safety
/// `blob` is NULL or leads to `size` bytes.
unsafe fn copy_figures(blob: *const c_void, size: u32) -> Option<GraphFigures> {
    if blob.is_null() || size < 16 {
        return None;
    }
    let size = size as usize;
    let mut copy = [0u8; size_of::<GraphBlob>()];
    // SAFETY: copies no more than the blob and the array hold.
    unsafe {
        std::ptr::copy_nonoverlapping(blob.cast::<u8>(), copy.as_mut_ptr(), size.min(copy.len()));
    }
    // SAFETY: the array has the structure's size, and any bytes are valid for its plain numbers.
    let values: GraphBlob = unsafe { copy.as_ptr().cast::<GraphBlob>().read_unaligned() };
    macro_rules! field {
        ($name:ident) => {{
            let end = std::mem::offset_of!(GraphBlob, $name) + size_of_val(&values.$name);
            (end <= size).then_some(values.$name)
        }};
    }
    let first = values.version == 1;
    let second = first && values.version2 == 2;
    Some(GraphFigures {
        spill_fill_bytes: field!(spill_fill).filter(|_| first),
        vtcm: field!(vtcm).filter(|_| first),
        optimization_level: field!(optimization).filter(|_| first),
        hvx_threads: field!(hvx_threads).filter(|_| first),
        io_tensor_bytes: field!(io_tensors).filter(|_| second),
        op_data_bytes: field!(op_data).filter(|_| second),
        const_bytes: field!(constants).filter(|_| second),
        ddr_tensor_bytes: field!(ddr_tensors).filter(|_| second),
        shared_weight_bytes: field!(shared_weights).filter(|_| second),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use qhx_types::DType;

    const VERSION: sys::Version = sys::Version { major: 1, minor: 0, patch: 0 };

    fn tensor(name: &std::ffi::CStr, dimensions: &[u32]) -> Tensor {
        Tensor {
            id: 5,
            name: name.as_ptr(),
            data_type: types::dtype_code(DType::F16),
            rank: dimensions.len() as u32,
            dimensions: dimensions.as_ptr(),
            ..Tensor::V1
        }
    }

    fn graph(inputs: &[Tensor], outputs: &[Tensor]) -> sys::GraphInfo {
        sys::GraphInfo {
            version: 3,
            name: c"g".as_ptr(),
            input_count: inputs.len() as u32,
            inputs: inputs.as_ptr(),
            output_count: outputs.len() as u32,
            outputs: outputs.as_ptr(),
            updatable_count: 0,
            updatable: std::ptr::null(),
            blob_size: 0,
            blob: std::ptr::null(),
            start_op: 0,
            end_op: 0,
        }
    }

    fn read(graphs: &[sys::GraphInfo]) -> Result<BinaryInfo, Fault> {
        read_list(graphs.as_ptr(), graphs.len() as u32)
    }

    fn read_list(graphs: *const sys::GraphInfo, graph_count: u32) -> Result<BinaryInfo, Fault> {
        let body = sys::BinaryInfoV3 {
            backend_id: 6,
            build_id: c"v2.51.0".as_ptr(),
            core: VERSION,
            backend: VERSION,
            soc: std::ptr::null(),
            blob_version: VERSION,
            blob_size: 0,
            tensor_count: 0,
            tensors: std::ptr::null(),
            graph_count,
            graphs,
            platform: std::ptr::null(),
            metadata_size: 0,
            metadata: std::ptr::null(),
            soc_model: 87,
        };
        let info = sys::BinaryInfo { version: 3, body: sys::BinaryInfoBody { v3: body } };
        // SAFETY: the description is of version 3, and its lists are the test's.
        unsafe { copy(&raw const info, 100) }
    }

    #[test]
    fn a_sound_description_is_copied() {
        let info = read(&[graph(&[tensor(c"x", &[1, 64])], &[tensor(c"y", &[2])])]).unwrap();
        assert_eq!((info.build_id.as_str(), info.soc_model), ("v2.51.0", Some(87)));
        let graph = &info.graphs[0];
        assert_eq!((graph.name.as_str(), graph.inputs[0].name.as_str()), ("g", "x"));
        assert_eq!(graph.inputs[0].shape, [1, 64]);
        assert_eq!(graph.outputs[0].dtype, Some(DType::F16));
    }

    /// The metadata that a child reads goes to the parent as JSON.
    #[test]
    fn a_description_survives_json() {
        let scales = [0.1, f32::MIN_POSITIVE, 1e-45, f32::MAX, 0.000_5]
            .map(|scale| ScaleOffset { scale, offset: -3 });
        let axis = QuantizeParams {
            definition: sys::QUANT_DEFINED,
            encoding: sys::ENCODING_AXIS_SCALE_OFFSET,
            value: sys::Encoding {
                axis: sys::AxisScaleOffset { axis: 1, count: 5, values: scales.as_ptr() },
            },
        };
        let plain = tensor(c"x \"\x01", &[1, 5]);
        let unknown = Tensor { data_type: 0x7777, ..plain };
        let info =
            read(&[graph(&[plain, unknown], &[Tensor { quantize: axis, ..plain }])]).unwrap();
        let text = serde_json::to_vec(&info).unwrap();
        assert_eq!(serde_json::from_slice::<BinaryInfo>(&text).unwrap(), info);
    }

    #[test]
    fn malformed_metadata_is_refused_by_its_field() {
        let good = tensor(c"x", &[1]);
        let long = std::ffi::CString::new(vec![b'n'; MAX_NAME + 1]).unwrap();
        let scales = QuantizeParams {
            definition: sys::QUANT_DEFINED,
            encoding: sys::ENCODING_AXIS_SCALE_OFFSET,
            value: sys::Encoding {
                axis: sys::AxisScaleOffset {
                    axis: 0,
                    count: u32::MAX,
                    values: std::ptr::dangling(),
                },
            },
        };
        let endless = QuantizeParams {
            definition: sys::QUANT_DEFINED,
            encoding: sys::ENCODING_SCALE_OFFSET,
            value: sys::Encoding { scale_offset: ScaleOffset { scale: f32::INFINITY, offset: 0 } },
        };
        let nameless = Tensor { name: std::ptr::null(), ..good };
        let tensors = [
            (nameless, "the name is missing"),
            (tensor(c"", &[1]), "the name is empty"),
            (tensor(c"\xff", &[1]), "the name is not UTF-8"),
            (tensor(&long, &[1]), "the name is longer than 1024 bytes"),
            (Tensor { version: 7, ..good }, "version 7, expected 1 or 2"),
            (Tensor { rank: 1 << 30, ..good }, "1073741824 dimensions, expected at most 16"),
            (
                Tensor { dimensions: std::ptr::null(), ..good },
                "the list of dimensions is missing, expected 1 entries",
            ),
            (Tensor { quantize: scales, ..good }, "4294967295 scales, expected at most 1048576"),
            (Tensor { quantize: endless, ..good }, "a scale is inf, expected a finite number"),
        ];
        for (tensor, expected) in tensors {
            let fault = read(&[graph(&[good], &[good, tensor])]).unwrap_err();
            let Fault::Content(fault) = fault else { panic!("{fault:?}") };
            assert!(fault.starts_with("graph 0 of 1: output 1 of 2: "), "{fault}");
            assert!(fault.contains(expected), "{fault}");
        }
        let whole = graph(&[good], &[good]);
        let odd = good.name.wrapping_add(1).cast::<Tensor>();
        let graphs = [
            (
                sys::GraphInfo { name: std::ptr::null(), ..whole },
                "graph 0 of 1: the name is missing",
            ),
            (sys::GraphInfo { version: 0, ..whole }, "graph 0 of 1: version 0, expected 1 to 3"),
            (
                sys::GraphInfo { input_count: 3_000_000, ..whole },
                "graph 0 of 1: 3000000 inputs, expected at most 16384 tensors in all graphs",
            ),
            (
                sys::GraphInfo { outputs: std::ptr::null(), ..whole },
                "graph 0 of 1: the list of outputs is missing, expected 1 entries",
            ),
            (
                sys::GraphInfo { inputs: odd.wrapping_byte_add(1 - odd.addr() % 2), ..whole },
                "graph 0 of 1: the list of inputs is misaligned, expected 1 entries",
            ),
        ];
        for (graph, expected) in graphs {
            assert_eq!(read(&[graph]).unwrap_err(), Fault::Content(expected.to_owned()));
        }
        let many = read_list(std::ptr::dangling(), 92_000_000).unwrap_err();
        assert_eq!(many, Fault::Content("92000000 graphs, expected at most 1024".to_owned()));
    }
}
