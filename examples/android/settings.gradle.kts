pluginManagement {
    repositories {
        google()
        mavenCentral()
    }
}

dependencyResolutionManagement {
    repositories {
        // The library: see gradle.properties.
        maven { url = uri(providers.gradleProperty("qhx.repository").get()) }
        google()
        mavenCentral()
    }
}

rootProject.name = "qhx-example"
include(":app")
