package dev.qhx.tests

import dev.qhx.Native
import org.w3c.dom.Document
import org.w3c.dom.Element
import java.io.File
import java.lang.reflect.Modifier
import java.util.zip.ZipFile
import javax.xml.parsers.DocumentBuilderFactory

private fun parsed(text: String): Document =
    DocumentBuilderFactory.newInstance().apply { isNamespaceAware = true }.newDocumentBuilder().parse(text.byteInputStream())

private fun Element.all(name: String): List<Element> {
    val found = getElementsByTagName(name)
    return List(found.length) { found.item(it) as Element }
}

private const val ANDROID = "http://schemas.android.com/apk/res/android"

/** The files that are laid out for Android, and the names in them. */
fun Suite.layout() {
    val folder = File(given.text("aar"))
    val version = given.text("version")
    val archive = { ZipFile(File(folder, "qhx-$version.aar")) }
    fun entry(name: String) = archive().use { zip -> zip.getInputStream(zip.getEntry(name)).readBytes() }

    test("every external function is exported, and nothing else") {
        val declared = Native::class.java.declaredMethods.filter { Modifier.isNative(it.modifiers) }
        check(declared.all { Modifier.isStatic(it.modifiers) })
        val names = declared.map { "Java_dev_qhx_Native_${it.name}" }.toSortedSet()
        check(names.size > 10)
        same(names, given.text("exports").lines().toSortedSet())
    }
    test("the archive has what Android takes") {
        val names = archive().use { zip -> zip.entries().asSequence().map { it.name }.filter { !it.endsWith("/") }.toSet() }
        val expected = setOf("AndroidManifest.xml", "classes.jar", "proguard.txt", "R.txt")
        same(expected, names - "jni/arm64-v8a/libqhxjni.so")
        val classes = File.createTempFile("classes", ".jar").apply { writeBytes(entry("classes.jar")) }
        ZipFile(classes).use { check(it.getEntry("dev/qhx/Model.class") != null && it.getEntry("dev/qhx/tests") == null) }
        classes.delete()
    }
    test("the manifest lets the app use the DSP") {
        val manifest = parsed(entry("AndroidManifest.xml").decodeToString()).documentElement
        same("manifest dev.qhx", "${manifest.tagName} ${manifest.getAttribute("package")}")
        check(manifest.all("uses-sdk").single().getAttributeNS(ANDROID, "minSdkVersion").toInt() >= 26)
        val library = manifest.all("uses-native-library").single()
        same("application", library.parentNode.nodeName)
        same("libcdsprpc.so", library.getAttributeNS(ANDROID, "name"))
        same("false", library.getAttributeNS(ANDROID, "required"))
    }
    test("the rules keep what the native part names") {
        val rules = entry("proguard.txt").decodeToString()
        val kept = Regex("""-keep(?:classeswithmembers)? class ([\w.]+)""").findAll(rules).map { it.groupValues[1] }.toList()
        same(listOf("dev.qhx.Native"), kept)
        check(Class.forName(kept[0]).declaredMethods.any { it.name == "failure" && !Modifier.isNative(it.modifiers) })
    }
    test("the POM names what an app needs") {
        val pom = parsed(File(folder, "qhx-$version.pom").readText()).documentElement
        fun Element.child(name: String) = all(name).first { it.parentNode == this }.textContent
        same("dev.qhx:qhx:$version:aar", listOf("groupId", "artifactId", "version", "packaging").joinToString(":") { pom.child(it) })
        val needs = pom.all("dependency").associate {
            "${it.child("groupId")}:${it.child("artifactId")}" to (it.child("version") to it.child("scope"))
        }
        same(
            setOf(
                "org.jetbrains.kotlin:kotlin-stdlib",
                "org.jetbrains.kotlinx:kotlinx-coroutines-android",
                "com.qualcomm.qti:qnn-runtime",
            ),
            needs.keys,
        )
        check(needs.values.all { (version, _) -> Regex("""\d+\.\d+\.\d+""").matches(version) }) { needs }
        same(KotlinVersion.CURRENT.toString(), needs.getValue("org.jetbrains.kotlin:kotlin-stdlib").first)
        val coroutines = Native::class.java.getResource("/META-INF/kotlinx_coroutines_core.version")
        same(coroutines?.readText()?.trim(), needs.getValue("org.jetbrains.kotlinx:kotlinx-coroutines-android").first)
        if (given.has("npu")) {
            // What bundles are compiled with.
            val manifest = File(given.bundle("npu/llama3-tiny.json")).readText()
            has(manifest, "v${needs.getValue("com.qualcomm.qti:qnn-runtime").first}.")
        }
        same("runtime", needs.getValue("com.qualcomm.qti:qnn-runtime").second)
    }
}
