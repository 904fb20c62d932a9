plugins {
    id("com.android.application")
    id("org.jetbrains.kotlin.android")
}

android {
    namespace = "dev.qhx.example"
    compileSdk = 35

    defaultConfig {
        applicationId = "dev.qhx.example"
        // Memory that host and DSP share comes from libcdsprpc with Android 8.
        minSdk = 26
        targetSdk = 35
        versionCode = 1
        versionName = "0.1.0"
        ndk { abiFilters += "arm64-v8a" }
    }

    // The DSP opens its libraries by their paths: they have to be files.
    packaging { jniLibs { useLegacyPackaging = true } }

    compileOptions {
        sourceCompatibility = JavaVersion.VERSION_1_8
        targetCompatibility = JavaVersion.VERSION_1_8
    }
    kotlinOptions { jvmTarget = "1.8" }
}

dependencies {
    // Brings kotlinx-coroutines-android and Qualcomm's libraries with it.
    implementation("dev.qhx:qhx:0.1.0")
}
