//! Faults as exceptions.

use std::convert::Infallible;

use jni::objects::{JByteArray, JClass, JThrowable};
use jni::{Env, EnvUnowned, JValue, jni_sig, jni_str};
use qhx::{Error, ErrorKind, catch_panic};
use qhx_bindings::{Ended, Fault};

/// Why a function has no result.
#[derive(Debug)]
pub(crate) enum Thrown {
    /// It failed.
    Fault(Fault),
    /// The virtual machine did, or holds an exception already.
    Java(jni::errors::Error),
}

pub(crate) type Result<T> = std::result::Result<T, Thrown>;

impl From<Fault> for Thrown {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Error> for Thrown {
    fn from(error: Error) -> Self {
        Self::Fault(error.into())
    }
}

impl From<Ended<Infallible>> for Thrown {
    fn from(ended: Ended<Infallible>) -> Self {
        match ended {
            Ended::Fault(fault) => Self::Fault(fault),
            Ended::Stopped(never) => match never {},
        }
    }
}

impl From<jni::errors::Error> for Thrown {
    fn from(error: jni::errors::Error) -> Self {
        Self::Java(error)
    }
}

/// Does the work of a function of `class`, with its faults and panics thrown as exceptions.
pub(crate) fn called<'local, T: Default>(
    mut env: EnvUnowned<'local>,
    class: &JClass<'_>,
    work: impl FnOnce(&mut Env<'local>) -> Result<T>,
) -> T {
    let outcome = env.with_env(|env| -> jni::errors::Result<T> {
        catch_panic(|| work(env)).or_else(|thrown| throw(env, class, thrown).map(|()| T::default()))
    });
    // What is left fails only when the virtual machine has no memory, and has thrown that.
    outcome.resolve::<jni::errors::LogErrorAndDefault>()
}

fn throw(env: &mut Env<'_>, class: &JClass<'_>, thrown: Thrown) -> jni::errors::Result<()> {
    if env.exception_check() {
        return Ok(());
    }
    let fault = match thrown {
        Thrown::Fault(fault) => fault,
        Thrown::Java(e) => Error::caused(ErrorKind::Internal, "the Java virtual machine", e).into(),
    };
    let error = fault.error();
    let kind = env.byte_array_from_slice(fault.kind().as_bytes())?;
    let message = env.byte_array_from_slice(error.message().as_bytes())?;
    let hint = match error.hint_text() {
        Some(hint) => env.byte_array_from_slice(hint.as_bytes())?,
        None => JByteArray::default(),
    };
    let made = env.call_static_method(
        class,
        jni_str!("failure"),
        jni_sig!("([B[B[BZJ)Ljava/lang/Throwable;"),
        &[
            JValue::Object(&kind),
            JValue::Object(&message),
            JValue::Object(&hint),
            JValue::Bool(error.code().is_some()),
            JValue::Long(error.code().unwrap_or_default().cast_signed()),
        ],
    )?;
    let throwable = env.cast_local::<JThrowable<'_>>(made.l()?)?;
    // It reports what it threw as an error.
    let _ = env.throw(throwable);
    Ok(())
}
