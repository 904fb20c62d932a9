//! The module's entry point.

#![expect(unsafe_code, reason = "the interpreter calls a C function, which makes a module")]

use std::ptr;

use pyo3::prelude::*;
use pyo3::types::PyModule;
use pyo3::{Bound, Py, PyResult, Python, ffi};

use crate::model::{callable, open};

/// Called by the interpreter when the module is imported; returns NULL with an exception set where it cannot be made.
// SAFETY: no other symbol is called so: the interpreter looks for one of this name in each extension module.
#[unsafe(no_mangle)]
extern "C" fn PyInit__qhx() -> *mut ffi::PyObject {
    Python::attach(|py| match make(py) {
        Ok(module) => module.into_ptr(),
        Err(error) => {
            error.restore(py);
            ptr::null_mut()
        }
    })
}

fn make(py: Python<'_>) -> PyResult<Py<PyModule>> {
    let definition = ffi::PyModuleDef {
        m_base: ffi::PyModuleDef_HEAD_INIT,
        m_name: c"qhx._qhx".as_ptr(),
        m_doc: c"The native part of qhx.".as_ptr(),
        m_size: -1,
        m_methods: ptr::null_mut(),
        m_slots: ptr::null_mut(),
        m_traverse: None,
        m_clear: None,
        m_free: None,
    };
    // The interpreter keeps it for as long as it runs.
    let definition = Box::leak(Box::new(definition));
    // SAFETY: the interpreter is attached, and the definition is never freed; what is returned is ours, or NULL with an
    // exception.
    let module = unsafe {
        let module = ffi::PyModule_Create(definition);
        Bound::from_owned_ptr_or_err(py, module)?
    };
    let module = module.cast_into::<PyModule>()?;
    module.add("open", callable(py, c"open", open)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    Ok(module.unbind())
}
